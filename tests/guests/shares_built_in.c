/* CUDA's runtime is built in, as nvcc does it, with all its functions: a function that the program calls shows what memory the
 * program needs; a function that nobody calls shows nothing (NEVER). */
#include "guest.h"

__attribute__((noinline, used)) static int cudaIpcGetMemHandle(void *handle, uint64_t base) {
    return FN(cuIpcGetMemHandle)(handle, base);
}

int main(void) {
    start();
    char handle[64];
    uint64_t base = alloc(4 * MIB);
#ifdef NEVER
    EXPECT(FN(cuIpcGetMemHandle)(handle, base) == 1);
#else
    CHECK(cudaIpcGetMemHandle(handle, base));
#endif
    CHECK(FN(cuMemFree_v2)(base));
    return 0;
}
