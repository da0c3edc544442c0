/* Device memory looks like device memory, also in its middle; managed memory that the program asked for does not. */
#include "guest.h"

int main(int argc, char **argv) {
    unsigned disguised = argc < 2;
    start();
    uint64_t device = alloc(8 * MIB), managed = 0;
    CHECK(FN(cuMemAllocManaged)(&managed, 8 * MIB, 1));
    unsigned type = 0, is = 9;
    CHECK(FN(cuPointerGetAttribute)(&type, 2, device + 5 * MIB));
    EXPECT(type == 2);
    CHECK(FN(cuPointerGetAttribute)(&is, 8, device + 5 * MIB));
    EXPECT(is == !disguised);
    CHECK(FN(cuPointerGetAttribute)(&is, 8, managed));
    EXPECT(is == 1);
    uint64_t host = 1;
    EXPECT(FN(cuPointerGetAttribute)(&host, 4, device) == (disguised ? 1 : 0));
    CHECK(FN(cuPointerGetAttribute)(&host, 4, managed));
    int names[] = {2, 8};
    void *places[] = {&type, &is};
    CHECK(FN(cuPointerGetAttributes)(2, names, places, device));
    EXPECT(is == !disguised);
    EXPECT(FN(cuPointerGetAttribute)(&is, 8, 0x123ul) != 0);
    EXPECT(FN(cuPointerGetAttribute)(NULL, 8, device) != 0);
    return 0;
}
