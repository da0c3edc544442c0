/* A function of the host on one stream waits for work on another one, which has just been given memory of a pool while it was
   busy: where that memory is brought in the stream's order, it waits behind the function of the host, for ever. */
#include "guest.h"
#include "waits.h"
#define BYTES (600 * MIB)
#define SMALL (4 * MIB)
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
        let_wait(round, b);
        CHECK(FN(cuMemsetD32Async)(small, round, SMALL / 4, a));
        CHECK(FN(cuMemcpyDtoHAsync_v2)(&counted, small, sizeof counted, a));
        CHECK(FN(cuStreamSynchronize)(a));
        EXPECT(counted == round);
        ready = round;
        CHECK(FN(cuStreamSynchronize)(b));
        CHECK(FN(cuMemFreeAsync)(small, a));
    } while (goes_on());
    return !counts(big, round + 1);
}
