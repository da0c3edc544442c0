/* The program has 6 MiB of memory of each thread, more than a thread's stack usually is. */
#include "guest.h"
static __thread char own[6 * MIB];
int main(void) {
    own[6 * MIB - 1] = 1;
    start();
    load_kernel();
    uint64_t memory = alloc(640 * MIB);
    CHECK(FN(cuMemsetD32_v2)(memory, 0, 64));
    uint32_t rounds = 0;
    do {
        CHECK(launch(memory, 64, 1000, NULL));
        rounds++;
    } while (goes_on());
    CHECK(FN(cuCtxSynchronize)());
    EXPECT(counts(memory, rounds));
    CHECK(FN(cuMemFree_v2)(memory));
    return 0;
}
