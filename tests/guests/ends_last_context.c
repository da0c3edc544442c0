/* The only context of the first card ends while memory that the program has created there is away. The program keeps that memory's
   handle, and goes on with the other card. PARKED and OVER as in loses_card.c. */
#include "guest.h"
#define BYTES (16 * MIB)
static void until(const char *file) {
    for (const char *name = getenv(file); name && access(name, F_OK) != 0;) usleep(500);
}
int main(void) {
    const int on_card[8] = {1, 0, 1, 0}, read_write[3] = {1, 0, 3};
    uint64_t handle, at;
    void *other;
    start();
    load_kernel();
    CHECK(FN(cuMemCreate)(&handle, BYTES, on_card, 0ul));
    CHECK(FN(cuMemAddressReserve)(&at, BYTES, 0ul, 0ul, 0ul));
    CHECK(FN(cuMemMap)(at, BYTES, 0ul, handle, 0ul));
    CHECK(FN(cuMemSetAccess)(at, BYTES, read_write, 1ul));
    CHECK(FN(cuMemsetD32_v2)(at, 7, BYTES / 4));
    CHECK(FN(cuDevicePrimaryCtxRetain)(&other, 1));
    CHECK(FN(cuCtxSetCurrent)(other));
    load_kernel();
    uint64_t memory = alloc(BYTES);
    CHECK(FN(cuMemsetD32_v2)(memory, 7, BYTES / 4));
    CHECK(FN(cuCtxSynchronize)());
    printf("ask 0\n"), fflush(stdout);
    until("PARKED");
    CHECK(FN(cuDevicePrimaryCtxReset_v2)(0));
    CHECK(launch(memory, 4, 10, NULL));
    CHECK(FN(cuCtxSynchronize)());
    EXPECT(counts(memory, 8));
    CHECK(FN(cuMemUnmap)(at, BYTES));
    CHECK(FN(cuMemRelease)(handle));
    printf("over 0\n"), fflush(stdout);
    until("OVER");
    _exit(0);
}
