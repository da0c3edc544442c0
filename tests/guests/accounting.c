/* Memory of every kind is counted while it lives, by whatever way it is freed, and nothing is left over. */
#include "guest.h"
struct location { int type, id; };
struct properties { int type, handles; struct location location; void *security; char flags[24]; };
struct array { size_t width, height, depth; int format; unsigned channels, flags; };

int main(void) {
    start();
    load_kernel();
    size_t before = free_bytes();
    uint64_t a = alloc(64 * MIB), b = 0, c = 0, d = 0;
    size_t pitch = 0;
    EXPECT(free_bytes() == before - 64 * MIB);
    CHECK(FN(cuMemAllocPitch_v2)(&b, &pitch, 1000ul, 2048ul, 4));
    EXPECT(free_bytes() == before - 64 * MIB - pitch * 2048);
    CHECK(FN(cuMemFree_v2)(b));
    CHECK(FN(cuMemAllocAsync)(&c, 32 * MIB, NULL));
    EXPECT(free_bytes() == before - 96 * MIB);
    CHECK(FN(cuMemFreeAsync)(c, NULL));
    CHECK(FN(cuMemAllocAsync)(&c, 32 * MIB, NULL));
    CHECK(FN(cuMemFree_v2)(c));
    EXPECT(free_bytes() == before - 64 * MIB);
    /* Physical memory: mapped twice, released before it is unmapped. */
    struct properties on_device = {.type = 1, .location = {1, 0}}, on_host = {.type = 1, .location = {2, 0}};
    uint64_t handle = 0, host = 0;
    CHECK(FN(cuMemCreate)(&handle, 16 * MIB, &on_device, 0ul));
    EXPECT(free_bytes() == before - 80 * MIB);
    CHECK(FN(cuMemAddressReserve)(&d, 32 * MIB, 0ul, 0ul, 0ul));
    CHECK(FN(cuMemMap)(d, 16 * MIB, 0ul, handle, 0ul));
    CHECK(FN(cuMemMap)(d + 16 * MIB, 16 * MIB, 0ul, handle, 0ul));
    CHECK(FN(cuMemRelease)(handle));
    EXPECT(free_bytes() == before - 80 * MIB);
    CHECK(FN(cuMemUnmap)(d, 16 * MIB));
    EXPECT(free_bytes() == before - 80 * MIB);
    CHECK(FN(cuMemUnmap)(d + 16 * MIB, 16 * MIB));
    EXPECT(free_bytes() == before - 64 * MIB);
    /* Memory of the host is not the GPU's. */
    CHECK(FN(cuMemCreate)(&host, 16 * MIB, &on_host, 0ul));
    EXPECT(free_bytes() == before - 64 * MIB);
    CHECK(FN(cuMemRelease)(host));
    struct array shape = {1024, 1024, 4, 0x01, 1, 0};
    void *array = NULL;
    CHECK(FN(cuArray3DCreate_v2)(&array, &shape));
    EXPECT(free_bytes() == before - 68 * MIB);
    CHECK(FN(cuArrayDestroy)(array));
    /* A context takes its allocations with it; memory of pools belongs to the device. */
    void *other;
    uint64_t ordered;
    CHECK(FN(cuCtxCreate_v2)(&other, 0, 0));
    alloc(8 * MIB);
    CHECK(FN(cuMemAllocAsync)(&ordered, 4 * MIB, NULL));
    EXPECT(free_bytes() == before - 76 * MIB);
    CHECK(FN(cuCtxDestroy_v2)(other));
    CHECK(FN(cuCtxSetCurrent)(context));
    EXPECT(free_bytes() == before - 68 * MIB);
    CHECK(FN(cuMemFreeAsync)(ordered, NULL));
    EXPECT(free_bytes() == before - 64 * MIB);
    /* Memory that is freed twice, or was never allocated, is for the driver to refuse, and changes nothing. */
    CHECK(FN(cuMemFree_v2)(a));
    EXPECT(FN(cuMemFree_v2)(a) != 0);
    EXPECT(FN(cuMemFreeAsync)(a, NULL) != 0);
    EXPECT(FN(cuMemRelease)(handle) != 0);
    EXPECT(FN(cuMemFree_v2)(0x1234560ul) != 0);
    b = alloc(8 * MIB);
    CHECK(launch(b, 64, 20000, NULL));
    CHECK(FN(cuMemFreeAsync)(b, NULL));
    EXPECT(FN(cuMemFree_v2)(b) != 0);
    CHECK(FN(cuCtxSynchronize)());
    CHECK(FN(cuMemFree_v2)(alloc(4 * MIB)));
    EXPECT(free_bytes() == before);
    return 0;
}
