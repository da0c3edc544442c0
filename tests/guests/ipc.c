/* Managed memory has no IPC handle: the driver refuses, and from then on allocations get memory that has one. */
#include "guest.h"

int main(int argc, char **argv) {
    (void)argv;
    start();
    char handle[64];
    uint64_t first = alloc(4 * MIB);
    EXPECT(FN(cuIpcGetMemHandle)(handle, first) == (argc > 1 ? 0 : 1));
    uint64_t second = alloc(4 * MIB);
    CHECK(FN(cuIpcGetMemHandle)(handle, second));
    CHECK(FN(cuMemFree_v2)(first));
    CHECK(FN(cuMemFree_v2)(second));
    return 0;
}
