/* A thread uses its own default stream in one context, and then the one in another context: a drain waits for the work on that
   one. */
#include "guest.h"
#define BYTES (600 * MIB)
#define PER_THREAD ((void *)2)
int main(void) {
    start();
    load_kernel();
    uint64_t first = alloc(4 * MIB);
    CHECK(launch(first, 4, 10, PER_THREAD));
    CHECK(FN(cuStreamSynchronize)(PER_THREAD));
    void *second;
    CHECK(FN(cuCtxCreate_v2)(&second, 0, 0));
    load_kernel();
    uint64_t memory = alloc(BYTES);
    CHECK(FN(cuMemsetD32_v2)(memory, 0, BYTES / 4));
    uint32_t rounds = 0;
    do {
        /* There is work in flight whenever a turn ends. */
        CHECK(launch(memory, BYTES / 4, 4000, PER_THREAD));
        if (++rounds % 100 == 0) CHECK(FN(cuStreamSynchronize)(PER_THREAD));
    } while (goes_on());
    CHECK(FN(cuStreamSynchronize)(PER_THREAD));
    EXPECT(holds(memory, BYTES, 50 * MIB, rounds));
    return 0;
}
