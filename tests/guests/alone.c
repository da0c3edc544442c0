/* Without a scheduler the card has its real size: an allocation that does not fit is refused, as the driver refuses it, and not
   paged. */
#include "guest.h"
int main(void) {
    start();
    uint64_t first = alloc(900 * MIB), second, third;
    EXPECT(FN(cuMemAlloc_v2)(&second, 200 * MIB) == 2);
    second = alloc(100 * MIB);
    CHECK(FN(cuMemFree_v2)(first));
    for (int i = 0; i < 3; i++) {
        first = alloc(800 * MIB);
        EXPECT(FN(cuMemAlloc_v2)(&third, 200 * MIB) == 2);
        CHECK(FN(cuMemFree_v2)(first));
    }
    return 0;
}
