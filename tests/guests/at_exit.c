/* What handlers do at exit: `at_exit lingers|reads|joins before|after`: registered before the driver is initialised, so that they run when the
   driver has shut down, or after, so that they run while it serves them. */
#include "guest.h"
static uint64_t memory_;
static pthread_t sleeper_;

static void lingers(void) {
    printf("lingers\n"), fflush(stdout);
    while (goes_on()) usleep(1000);
}

static void *read_it(void *who) {
    uint32_t word = 0;
    int chosen = FN(cuCtxSetCurrent)(context), read = FN(cuMemcpyDtoH_v2)(&word, memory_, sizeof word);
    printf("%s %d %d %u\n", (char *)who, chosen, read, word), fflush(stdout);
    return NULL;
}
static void reads(void) {
    pthread_t thread;
    read_it("handler");
    CHECK(pthread_create(&thread, NULL, read_it, "thread"));
    CHECK(pthread_join(thread, NULL));
}

static void *works(void *unused) {
    (void)unused;
    CHECK(FN(cuCtxSetCurrent)(context));
    printf("works\n"), fflush(stdout);
    int worked = FN(cuMemsetD32_v2)(memory_, 8, 4 * MIB);
    printf("worked %d\n", worked), fflush(stdout);
    return NULL;
}
static void joins(void) { CHECK(pthread_join(sleeper_, NULL)); }

int main(int count, char **arguments) {
    EXPECT(count == 3);
    int is_before = !strcmp(arguments[2], "before"), is_joined = !strcmp(arguments[1], "joins");
    void (*handler)(void) = is_joined ? joins : !strcmp(arguments[1], "reads") ? reads : lingers;
    if (is_before) atexit(handler);
    start();
    load_kernel();
    if (!is_before) atexit(handler);
    memory_ = alloc(16 * MIB);
    CHECK(FN(cuMemsetD32_v2)(memory_, 7, 4 * MIB));
    CHECK(FN(cuCtxSynchronize)());
    printf("has worked\n"), fflush(stdout);
    for (const char *wake = getenv("WAKE"); wake && access(wake, F_OK) != 0;) usleep(500);
    if (is_joined) {
        CHECK(pthread_create(&sleeper_, NULL, works, NULL));
        /* It sleeps at the gate when the scheduler hears of it. */
        for (const char *stop = getenv("STOP"); stop && access(stop, F_OK) != 0;) usleep(500);
    }
    return 0;
}
