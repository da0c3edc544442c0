/* 300 MiB, and as many again when the file exists that WAKE names: all of them keep their words. */
#include "guest.h"
#define BYTES (300 * MIB)
int main(void) {
    start();
    uint64_t first = alloc(BYTES), second;
    CHECK(FN(cuMemsetD32_v2)(first, 7, BYTES / 4));
    CHECK(FN(cuCtxSynchronize)());
    printf("ready\n"), fflush(stdout);
    while (access(getenv("WAKE"), F_OK) != 0) usleep(500);
    second = alloc(BYTES);
    printf("allocated\n"), fflush(stdout);
    CHECK(FN(cuMemsetD32_v2)(second, 8, BYTES / 4));
    CHECK(FN(cuCtxSynchronize)());
    EXPECT(holds(first, BYTES, 50 * MIB, 7) && holds(second, BYTES, 50 * MIB, 8));
    return 0;
}
