/* An allocation that can never be, of an amount that no card has, right after memory was freed in the order of a stream that has
   reached the free: the library may wait for that memory, and refuses the allocation then. Prints nothing. */
#include "guest.h"
#define ROUNDS 20
#define SMALL (8 * MIB)
#define OUT_OF_MEMORY 2
int main(void) {
    void *stream;
    start();
    CHECK(FN(cuStreamCreate)(&stream, 1));
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t small = alloc(SMALL), none = 0;
        CHECK(FN(cuMemsetD32Async)(small, round, SMALL / 4, stream));
        CHECK(FN(cuMemFreeAsync)(small, stream));
        CHECK(FN(cuStreamSynchronize)(stream));
        EXPECT(FN(cuMemAlloc_v2)(&none, (size_t)1 << 42) == OUT_OF_MEMORY);
    }
    return 0;
}
