/* The device is reset while memory is on the card, on its way, or on the host: the program begins anew each time. */
#include "guest.h"
#define BYTES (512 * MIB)
int main(void) {
    unsigned seed = 1;
    for (uint32_t round = 0; round == 0 || goes_on(); round++) {
        start();
        load_kernel();
        uint64_t memory = alloc(BYTES);
        CHECK(FN(cuMemsetD32_v2)(memory, round, BYTES / 4));
        CHECK(launch(memory, BYTES / 4, 1000, NULL));
        CHECK(FN(cuCtxSynchronize)());
        /* It is idle, and another program takes the GPU. */
        usleep(rand_r(&seed) % 250000);
        if (round % 3 == 0) {
            EXPECT(holds(memory, BYTES, 16 * MIB, round + 1));
        }
        CHECK(FN(cuDevicePrimaryCtxReset_v2)(0));
    }
    return 0;
}
