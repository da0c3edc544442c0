/* A function of the host on one stream waits for work on another one, which has just been given memory of a pool while it was
   busy: where that memory is brought in the stream's order, it waits behind the function of the host, for ever. */
#include "guest.h"
#include <time.h>
#define BYTES (600 * MIB)
#define SMALL (4 * MIB)
static volatile uint32_t begun, ready;
static void wait_until_ready(void *data) {
    uint32_t round = (uint32_t)(uintptr_t)data;
    struct timespec began, now;
    begun = round;
    for (clock_gettime(CLOCK_MONOTONIC, &began); ready < round; usleep(100)) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec - began.tv_sec > 60) { fprintf(stderr, "round %u: waited 60 s for the other stream\n", round); _exit(3); }
    }
}
int main(void) {
    uint64_t big, small;
    uint32_t round = 0, counted;
    void *a, *b;
    start();
    load_kernel();
    CHECK(FN(cuStreamCreate)(&a, 1));
    CHECK(FN(cuStreamCreate)(&b, 1));
    CHECK(FN(cuMemAllocAsync)(&big, BYTES, a));
    CHECK(FN(cuMemsetD32Async)(big, 0, BYTES / 4, a));
    CHECK(launch(big, 4, 1, a));
    CHECK(FN(cuStreamSynchronize)(a));
    do {
        round++;
        CHECK(launch(big, 4, 20000, a));
        CHECK(FN(cuMemAllocAsync)(&small, SMALL, a));
        CHECK(FN(cuLaunchHostFunc)(b, wait_until_ready, (void *)(uintptr_t)round));
        while (begun < round) usleep(100);
        CHECK(FN(cuMemsetD32Async)(small, round, SMALL / 4, a));
        CHECK(FN(cuMemcpyDtoHAsync_v2)(&counted, small, sizeof counted, a));
        CHECK(FN(cuStreamSynchronize)(a));
        EXPECT(counted == round);
        ready = round;
        CHECK(FN(cuStreamSynchronize)(b));
        CHECK(FN(cuMemFreeAsync)(small, a));
    } while (goes_on());
    CHECK(FN(cuMemcpyDtoH_v2)(&counted, big, sizeof counted));
    if (counted != round + 1) { fprintf(stderr, "%u of %u launches\n", counted, round + 1); return 1; }
    return 0;
}
