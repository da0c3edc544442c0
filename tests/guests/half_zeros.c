/* One allocation holds zeros, and other words in its last quarter. It lies idle until the program is woken, and holds them then. */
#include "guest.h"
#define BYTES (256 * MIB)
#define ZEROS (192 * MIB)
int main(void) {
    start();
    load_kernel();
    uint64_t memory = alloc(BYTES);
    CHECK(FN(cuMemsetD32_v2)(memory, 0, ZEROS / 4));
    CHECK(FN(cuMemsetD32_v2)(memory + ZEROS, 7, (BYTES - ZEROS) / 4));
    CHECK(FN(cuCtxSynchronize)());
    printf("has memory\n");
    fflush(stdout);
    while (access(getenv("WAKE"), F_OK) != 0 && goes_on()) usleep(1000);
    CHECK(launch(memory, BYTES / 4, 500, NULL));
    CHECK(FN(cuCtxSynchronize)());
    EXPECT(holds(memory, ZEROS, 2 * MIB, 1) && holds(memory + ZEROS, BYTES - ZEROS, 2 * MIB, 8));
    return 0;
}
