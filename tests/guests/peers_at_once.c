/* Two threads enable the same peer access. The second one is told that it is there, and launches a kernel that needs it. The calls of the
   first one that set the access are held up for two seconds; shorter, if the kernel has run by then. */
#include "guest.h"
static void *other;
static uint64_t there;
static volatile int has_run;
static void *enable(void *unused) {
    CHECK(FN(cuCtxSetCurrent)(context));
    CHECK(FN(cuCtxEnablePeerAccess)(other, 0));
    return unused;
}
static void *enable_again(void *unused) {
    CHECK(FN(cuCtxSetCurrent)(context));
    EXPECT(FN(cuCtxEnablePeerAccess)(other, 0) == 704);
    CHECK(launch(there, 9 * MIB, 10, NULL));
    CHECK(FN(cuCtxSynchronize)());
    has_run = 1;
    return unused;
}
int main(void) {
    start();
    load_kernel();
    CHECK(FN(cuDevicePrimaryCtxRetain)(&other, 1));
    CHECK(FN(cuCtxSetCurrent)(other));
    there = alloc(36 * MIB);
    CHECK(FN(cuMemsetD32_v2)(there, 7, 9 * MIB));
    CHECK(FN(cuCtxSynchronize)());
    CHECK(FN(cuCtxSetCurrent)(context));
    char waits[4096];
    const char *held = held_file();
    snprintf(waits, sizeof waits, "%s.waits", held);
    fclose(fopen(held, "w"));
    pthread_t first, second;
    CHECK(pthread_create(&first, NULL, enable, NULL));
    while (access(waits, F_OK) != 0) usleep(1000);
    CHECK(pthread_create(&second, NULL, enable_again, NULL));
    for (int i = 0; i < 2000 && !has_run; i++) usleep(1000);
    CHECK(unlink(held));
    CHECK(pthread_join(first, NULL));
    CHECK(pthread_join(second, NULL));
    holds_in_each_word(there, 36 * MIB, 8);
    return 0;
}
