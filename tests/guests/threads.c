/* Two thousand threads, each of which launches, allocates and ends. */
#include "guest.h"
static void *work(void *argument) {
    (void)argument;
    CHECK(FN(cuCtxSetCurrent)(context));
    uint64_t base = alloc(64 * 1024);
    for (int i = 0; i < 5; i++) CHECK(launch(base, 64, 1, NULL));
    CHECK(FN(cuMemFree_v2)(base));
    return NULL;
}
int main(void) {
    start();
    load_kernel();
    for (int round = 0; round < 20; round++) {
        in_threads(100, work);
    }
    CHECK(FN(cuCtxSynchronize)());
    return 0;
}
