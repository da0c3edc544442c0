/* Memory of a pool that was handed out for the primary context is used from another one after a reset. */
#include "guest.h"
#define BYTES (600 * MIB)
int main(void) {
    start();
    void *stream, *second;
    uint64_t memory;
    uint32_t rounds = 0;
    CHECK(FN(cuStreamCreate)(&stream, 1));
    CHECK(FN(cuMemAllocAsync)(&memory, BYTES, stream));
    CHECK(FN(cuMemsetD32Async)(memory, 0, BYTES / 4, stream));
    CHECK(FN(cuStreamSynchronize)(stream));
    CHECK(FN(cuCtxCreate_v2)(&second, 0, 0));
    CHECK(FN(cuDevicePrimaryCtxReset_v2)(0));
    load_kernel();
    do {
        CHECK(launch(memory, BYTES / 4, 4000, NULL));
        if (++rounds % 100 == 0) CHECK(FN(cuCtxSynchronize)());
    } while (goes_on());
    CHECK(FN(cuCtxSynchronize)());
    EXPECT(holds(memory, BYTES, 50 * MIB, rounds));
    return 0;
}
