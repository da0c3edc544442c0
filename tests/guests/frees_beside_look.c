/* Memory is freed, its work complete, while the library looks at it, which is held up until the free is over: no free waits for a look. */
#include "guest.h"
#define KEPT (448 * MIB)
#define PART (8 * MIB)
static uint64_t part;
static volatile int freed;
static void *frees(void *held) {
    char waits[512];
    snprintf(waits, sizeof waits, "%s.waits", (char *)held);
    CHECK(FN(cuCtxSetCurrent)(context));
    while (access(waits, F_OK)) usleep(1000);
    CHECK(FN(cuMemFree_v2)(part));
    CHECK(unlink(held));
    freed = 1;
    return NULL;
}
int main(void) {
    pthread_t thread;
    char *held = held_file();
    EXPECT(held);
    start();
    load_kernel();
    uint64_t kept = alloc(KEPT);
    part = alloc(PART);
    CHECK(launch(part, PART / 4, 100, NULL));
    CHECK(FN(cuCtxSynchronize)());
    fclose(fopen(held, "w"));
    puts("ready");
    fflush(stdout);
    CHECK(pthread_create(&thread, NULL, frees, held));
    do {
        CHECK(launch(kept, 4, 100, NULL));
        CHECK(FN(cuCtxSynchronize)());
    } while (!freed || goes_on());
    CHECK(pthread_join(thread, NULL));
    return 0;
}
