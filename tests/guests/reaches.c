/* Memory on a card on which nothing ever runs: a kernel of another card reaches it. */
#include "guest.h"
int main(void) {
    void *other;
    start();
    load_kernel();
    CHECK(FN(cuDevicePrimaryCtxRetain)(&other, 1));
    CHECK(FN(cuCtxSetCurrent)(other));
    uint64_t there = alloc(4 * MIB);
    CHECK(FN(cuCtxSetCurrent)(context));
    CHECK(FN(cuCtxEnablePeerAccess)(other, 0));
    CHECK(launch(there, MIB, 10, NULL));
    CHECK(FN(cuCtxSynchronize)());
    return 0;
}
