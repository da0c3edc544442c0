/* A program that looks at memory before it allocates any, as JAX does to size its pool: it sees its limit, or the argument. */
#include "guest.h"
int main(int argc, char **argv) {
    EXPECT(argc == 2);
    start();
    size_t left = 0, total = 0, device = 0;
    CHECK(FN(cuMemGetInfo_v2)(&left, &total));
    if (total != strtoul(argv[1], NULL, 10) || left != total) { fprintf(stderr, "%zu of %zu\n", left, total); return 1; }
    CHECK(FN(cuDeviceTotalMem_v2)(&device, 0));
    EXPECT(device == total);
    return 0;
}
