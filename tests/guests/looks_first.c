/* A program that looks at memory before it allocates any, as JAX does to size its pool. It sees so many MiB free and in all
   (arguments). */
#include "guest.h"
int main(int argc, char **argv) {
    EXPECT(argc == 3);
    start();
    size_t left = 0, total = 0, device = 0;
    CHECK(FN(cuMemGetInfo_v2)(&left, &total));
    if (left != strtoul(argv[1], NULL, 10) * MIB || total != strtoul(argv[2], NULL, 10) * MIB) { fprintf(stderr, "%zu of %zu\n", left, total); return 1; }
    CHECK(FN(cuDeviceTotalMem_v2)(&device, 0));
    EXPECT(device == total);
    return 0;
}
