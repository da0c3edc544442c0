/* The GPU has work, and so the gate is open; then one large allocation. */
#include "guest.h"
int main(void) {
    start();
    uint64_t small = alloc(2 * MIB);
    CHECK(FN(cuMemsetD32_v2)(small, 6, MIB / 2));
    uint64_t large = alloc(640 * MIB);
    CHECK(FN(cuMemsetD32_v2)(large, 7, 160 * MIB));
    holds_in_each_word(large, 640 * MIB, 7);
    return 0;
}
