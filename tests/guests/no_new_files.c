/* The program forbids itself new descriptors, and with them `poll`. */
#include "guest.h"
#include <sys/resource.h>
#include <time.h>
static double seconds(struct timespec time) { return time.tv_sec + time.tv_nsec / 1e9; }
int main(void) {
    start();
    load_kernel();
    uint64_t memory = alloc(512 * MIB);
    CHECK(FN(cuMemsetD32_v2)(memory, 0, 128 * MIB));
    CHECK(launch(memory, 64, 100, NULL));
    CHECK(FN(cuCtxSynchronize)());
    struct rlimit none = {0, 0};
    struct timespec began, worked_before;
    clock_gettime(CLOCK_MONOTONIC, &began);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &worked_before);
    CHECK(setrlimit(RLIMIT_NOFILE, &none));
    for (int i = 0; i < 100; i++) {
        CHECK(launch(memory, 64, 10000, NULL));
        CHECK(FN(cuCtxSynchronize)());
    }
    EXPECT(counts(memory, 101));
    struct timespec worked, now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &worked);
    clock_gettime(CLOCK_MONOTONIC, &now);
    /* No thread looks all the time for what it cannot see. */
    EXPECT((seconds(worked) - seconds(worked_before)) * 2 < seconds(now) - seconds(began));
    return 0;
}
