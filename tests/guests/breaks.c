/* A kernel reaches an illegal address: the context is broken from then on, and the program lives on with its memory. */
#include "guest.h"
int main(void) {
    start();
    load_kernel();
    uint64_t memory[3];
    for (int i = 0; i < 3; i++) {
        memory[i] = alloc(200 * MIB);
        CHECK(launch(memory[i], 50 * MIB, 10, NULL));
    }
    CHECK(FN(cuCtxSynchronize)());
    CHECK(launch(0x10000, 4, 10, NULL));
    EXPECT(FN(cuCtxSynchronize)() == 700);
    printf("broken\n"), fflush(stdout);
    while (goes_on()) usleep(1000);
    EXPECT(launch(memory[0], 4, 10, NULL) == 700);
    return 0;
}
