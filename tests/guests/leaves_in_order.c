/* A large allocation that changes with each kernel, and smaller ones that do not: the large one leaves first by its size. Runs until
   the file exists that STOP names. */
#include "guest.h"
enum { COUNT = 4 };
static const size_t EACH = 64 * MIB, LARGE = 256 * MIB;
int main(void) {
    start();
    load_kernel();
    uint64_t large = alloc(LARGE), still[COUNT];
    CHECK(FN(cuMemsetD32_v2)(large, 9, LARGE / 4));
    for (int i = 0; i < COUNT; i++) {
        still[i] = alloc(EACH);
        CHECK(FN(cuMemsetD32_v2)(still[i], 7000 + i, EACH / 4));
    }
    uint32_t rounds = 0;
    do {
        CHECK(launch(large, LARGE / 4, 1000, NULL));
        CHECK(FN(cuCtxSynchronize)());
        rounds++;
    } while (goes_on());
    holds_in_each_word(large, LARGE, 9 + rounds);
    for (int i = 0; i < COUNT; i++) holds_in_each_word(still[i], EACH, 7000 + i);
    return 0;
}
