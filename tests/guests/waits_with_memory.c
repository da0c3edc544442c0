/* The program has memory and gives the GPU nothing to do until it is told; then its memory is at work until the test stops. */
#include "guest.h"
enum { COUNT = 12 };
static const size_t EACH = 64 * MIB;
int main(void) {
    uint64_t base[COUNT];
    start();
    load_kernel();
    for (int i = 0; i < COUNT; i++) base[i] = alloc(EACH);
    printf("has memory\n");
    fflush(stdout);
    const char *wake = getenv("WAKE");
    EXPECT(wake);
    while (access(wake, F_OK) != 0 && goes_on()) usleep(1000);
    for (int i = 0; i < COUNT; i++) CHECK(FN(cuMemsetD32_v2)(base[i], 7000 + i, EACH / 4));
    uint32_t rounds = 0;
    for (; goes_on(); rounds++) {
        for (int i = 0; i < COUNT; i++) CHECK(launch(base[i], EACH / 4, 500, NULL));
        CHECK(FN(cuCtxSynchronize)());
    }
    for (int i = 0; i < COUNT; i++) EXPECT(holds(base[i], EACH, 2 * MIB, 7000 + i + rounds));
    return 0;
}
