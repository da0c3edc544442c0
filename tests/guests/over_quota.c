/* 100 MiB are allowed: every way to allocate more returns out of memory, and leaves existing memory as it was. */
#include "guest.h"
struct properties { int type, handles, location_type, location_id; void *security; char flags[24]; };
struct array { size_t width, height, depth; int format; unsigned channels, flags; };

int main(void) {
    start();
    uint64_t a = alloc(60 * MIB), b = 0;
    size_t before = free_bytes(), pitch = 0;
    EXPECT(before == 40 * MIB);
    struct properties on_device = {.type = 1, .location_type = 1};
    struct array shape = {1024, 1024, 50, 0x01, 1, 0};
    EXPECT(FN(cuMemAlloc_v2)(&b, 50 * MIB) == 2);
    EXPECT(FN(cuMemAllocManaged)(&b, 50 * MIB, 1) == 2);
    EXPECT(FN(cuMemAllocPitch_v2)(&b, &pitch, 50 * MIB, 1ul, 4) == 2);
    EXPECT(FN(cuMemAllocAsync)(&b, 50 * MIB, NULL) == 2);
    EXPECT(FN(cuMemCreate)(&b, 50 * MIB, &on_device, 0ul) == 2);
    /* A part of the device's memory: the bytes of the identifier are the device and the part. */
    struct properties on_part = {.type = 1, .location_type = 6, .location_id = 0x100};
    EXPECT(FN(cuMemCreate)(&b, 50 * MIB, &on_part, 0ul) == 2);
    EXPECT(FN(cuArray3DCreate_v2)(&b, &shape) == 2);
    EXPECT(b == 0 && free_bytes() == before);
    CHECK(FN(cuMemAllocAsync)(&b, 40 * MIB, NULL));
    EXPECT(free_bytes() == 0);
    CHECK(FN(cuMemFreeAsync)(b, NULL));
    CHECK(FN(cuMemFree_v2)(a));
    EXPECT(free_bytes() == 100 * MIB);
    return 0;
}
