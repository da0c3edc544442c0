/* The device is reset while another thread is in the middle of an allocation. Then the program begins anew, until the file exists that
   STOP names. */
#include "guest.h"
static int answer = -1;
static void *allocates(void *none) {
    uint64_t base;
    CHECK(FN(cuCtxSetCurrent)(context));
    answer = FN(cuMemAlloc_v2)(&base, 64 * MIB);
    return none;
}
int main(void) {
    const char *held = held_file();
    char waits[512];
    pthread_t thread;
    snprintf(waits, sizeof waits, "%s.waits", held);
    start();
    load_kernel();
    /* From here on it has the lock. */
    CHECK(launch(alloc(4 * MIB), 4, 10, NULL));
    CHECK(FN(cuCtxSynchronize)());
    fclose(fopen(held, "w"));
    CHECK(pthread_create(&thread, NULL, allocates, NULL));
    while (access(waits, F_OK)) usleep(1000);
    CHECK(FN(cuDevicePrimaryCtxReset_v2)(0));
    CHECK(unlink(held));
    CHECK(pthread_join(thread, NULL));
    EXPECT(answer == 709);
    start();
    load_kernel();
    uint64_t memory = alloc(16 * MIB);
    CHECK(FN(cuMemsetD32_v2)(memory, 7, 4 * MIB));
    printf("ready\n"), fflush(stdout);
    uint32_t rounds = 0;
    do {
        CHECK(launch(memory, 4, 1000, NULL));
        CHECK(FN(cuCtxSynchronize)());
        rounds++;
    } while (goes_on());
    EXPECT(counts(memory, 7 + rounds));
    return 0;
}
