/* A green context keeps the primary context of its device after the program has released that; both end together. */
#include "guest.h"
#define BYTES (600 * MIB)
int main(void) {
    char all[144], groups[2][144], rest[144];
    do {
        void *description, *green;
        unsigned count = 2;
        start();
        load_kernel();
        uint64_t memory = alloc(BYTES);
        CHECK(FN(cuMemsetD32_v2)(memory, 0, BYTES / 4));
        for (int i = 0; i < 150; i++) {
            CHECK(launch(memory, BYTES / 4, 2000, NULL));
            CHECK(FN(cuCtxSynchronize)());
        }
        CHECK(FN(cuDeviceGetDevResource)(0, all, 1));
        CHECK(FN(cuDevSmResourceSplitByCount)(groups, &count, all, rest, 0, 8));
        CHECK(FN(cuDevResourceGenerateDesc)(&description, groups, 1));
        CHECK(FN(cuGreenCtxCreate)(&green, description, 0, 1));
        CHECK(FN(cuDevicePrimaryCtxRelease_v2)(0));
        CHECK(launch(memory, BYTES / 4, 100, NULL));
        CHECK(FN(cuCtxSynchronize)());
        CHECK(FN(cuGreenCtxDestroy)(green));
        EXPECT(FN(cuCtxSynchronize)() != 0);
    } while (goes_on());
    return 0;
}
