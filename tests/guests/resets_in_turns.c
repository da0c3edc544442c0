/* Fills memory, uses it for some turns, finds it as it was, and resets the device; again and again until it is told to stop. */
#include "guest.h"
enum { COUNT = 6, ROUNDS = 2 };
static const size_t EACH = 64 * MIB;
int main(void) {
    uint32_t *words = malloc(EACH);
    int round = 0;
    CHECK(FN(cuInit)(0));
    do {
        uint64_t memory[COUNT];
        void *now;
        CHECK(FN(cuDevicePrimaryCtxRetain)(&now, 0));
        CHECK(FN(cuCtxSetCurrent)(now));
        load_kernel();
        for (int i = 0; i < COUNT; i++) {
            memory[i] = alloc(EACH);
            /* Every other one is zero. */
            CHECK(FN(cuMemsetD32_v2)(memory[i], i % 2 ? 0 : round * 100 + i + 1, EACH / 4));
        }
        for (int i = 0; i < 120; i++) {
            CHECK(launch(0, 0, 2000, NULL));
            CHECK(FN(cuCtxSynchronize)());
        }
        for (int i = 0; i < COUNT; i++) {
            CHECK(FN(cuMemcpyDtoH_v2)(words, memory[i], EACH));
            for (size_t j = 0; j < EACH / 4; j++) EXPECT(words[j] == (i % 2 ? 0 : round * 100 + i + 1));
        }
        CHECK(FN(cuDevicePrimaryCtxReset_v2)(0));
        CHECK(FN(cuDevicePrimaryCtxRelease_v2)(0));
        round++;
    } while (round < ROUNDS || goes_on());
    printf("right %d\n", round);
    return 0;
}
