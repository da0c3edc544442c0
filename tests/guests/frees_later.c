/* Memory that was freed in the order of a stream that has reached the free, while a function of the host on another stream waits for
   the thread that allocates again or asks what is free: where the memory is freed within that call, by a free that waits for the
   device, both wait for ever. */
#include "guest.h"
#include "waits.h"
#define BYTES (600 * MIB)
#define SMALL (8 * MIB)
int main(void) {
    uint64_t big, small, other;
    uint32_t round = 0;
    void *a, *b;
    start();
    load_kernel();
    CHECK(FN(cuStreamCreate)(&a, 1));
    CHECK(FN(cuStreamCreate)(&b, 1));
    big = alloc(BYTES);
    CHECK(FN(cuMemsetD32_v2)(big, 0, BYTES / 4));
    /* A fill may return before it is done, and non-blocking streams do not wait for it. */
    CHECK(FN(cuCtxSynchronize)());
    do {
        round++;
        small = alloc(SMALL);
        CHECK(FN(cuMemsetD32Async)(small, round, SMALL / 4, a));
        CHECK(FN(cuMemFreeAsync)(small, a));
        CHECK(launch(big, 4, 2000, a));
        CHECK(FN(cuStreamSynchronize)(a));
        let_wait(round, b);
        switch (round % 3) {
            case 0: free_bytes(); break;
            case 1: other = alloc(SMALL); break;
            case 2: CHECK(FN(cuMemAllocAsync)(&other, SMALL, a)); break;
        }
        ready = round;
        CHECK(FN(cuStreamSynchronize)(b));
        if (round % 3) CHECK(FN(cuMemFreeAsync)(other, a));
        CHECK(FN(cuStreamSynchronize)(a));
    } while (goes_on());
    return !counts(big, round);
}
