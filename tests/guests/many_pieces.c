/* Many allocations of 2 MiB. Runs until the file exists that STOP names; then tells how often memory was mapped, and how many events
   were created. */
#include "guest.h"
enum { COUNT = 256 };
int main(void) {
    start();
    load_kernel();
    uint64_t piece[COUNT], mapped, events;
    for (int i = 0; i < COUNT; i++) {
        piece[i] = alloc(2 * MIB);
        CHECK(FN(cuMemsetD32_v2)(piece[i], 7000 + i, 2 * MIB / 4));
    }
    uint32_t rounds = 0;
    do {
        /* Long kernels: marks behind launches are events as well. */
        CHECK(launch(piece[0], MIB / 2, 20000, NULL));
        CHECK(FN(cuCtxSynchronize)());
        rounds++;
    } while (goes_on());
    holds_in_each_word(piece[0], 2 * MIB, 7000 + rounds);
    for (int i = 1; i < COUNT; i++) holds_in_each_word(piece[i], 2 * MIB, 7000 + i);
    CHECK(FN(nvsimMapped)(&mapped));
    CHECK(FN(nvsimEvents)(&events));
    printf("mapped %lu events %lu\n", (unsigned long)mapped, (unsigned long)events);
    return 0;
}
