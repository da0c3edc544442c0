/* The program has used all of its descriptors but $LEFT, when its memory leaves and comes back. */
#include "guest.h"
#include <fcntl.h>
enum { COUNT = 8 };
static const size_t EACH = 64 * MIB;
int main(void) {
    uint64_t base[COUNT];
    int opened[4096], count = 0, left = atoi(getenv("LEFT"));
    start();
    load_kernel();
    for (int i = 0; i < COUNT; i++) {
        base[i] = alloc(EACH);
        CHECK(FN(cuMemsetD32_v2)(base[i], 7000 + i, EACH / 4));
    }
    /* What looks for the end of the test is open already. */
    while ((opened[count] = open("/dev/null", O_RDONLY)) >= 0) EXPECT(++count < 4096);
    EXPECT(count > left);
    for (int i = 0; i < left; i++) close(opened[--count]);
    printf("few are left\n");
    fflush(stdout);
    do {
        CHECK(launch(0, 0, 1000, NULL));
        CHECK(FN(cuCtxSynchronize)());
    } while (goes_on());
    for (int i = 0; i < count; i++) close(opened[i]);
    for (int i = 0; i < COUNT; i++) EXPECT(holds(base[i], EACH, 2 * MIB, 7000 + i));
    return 0;
}
