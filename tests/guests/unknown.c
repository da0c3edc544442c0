/* A newer driver returns unknown codes, and the program passes unknown flags, attributes and structures: all of it goes through
   unchanged, and the accounts stay right. */
#include "guest.h"
#define CODE 12345
struct properties { int type, handles, location_type, location_id; void *security; char flags[24]; };
struct array { size_t width, height, depth; int format; unsigned channels, flags; };
int main(void) {
    CHECK(FN(cuInit)(0));
    uint64_t base = alloc(MIB), ordered, handle, other = 77;
    size_t before, pitch;
    struct properties on_device = {.type = 99, .handles = 99, .location_type = 1};
    struct array shape = {64, 64, 1, 0x7fff, 9, 0x10000};
    struct { char dims[32]; void *stream; void *attributes; unsigned count; } config = {.count = 9};
    int attributes[16] = {0x7fff};
    config.attributes = attributes;
    CHECK(FN(cuMemAllocAsync)(&ordered, MIB, NULL));
    CHECK(FN(cuMemCreate)(&handle, MIB, &on_device, 0xff00ul));
    before = free_bytes();
    void (*answers)(int) = look_up("odd_answers");
    answers(CODE);
    EXPECT(FN(cuMemAlloc_v2)(&other, MIB) == CODE);
    EXPECT(FN(cuMemAllocManaged)(&other, MIB, 0xabc) == CODE);
    EXPECT(FN(cuMemAllocPitch_v2)(&other, &pitch, 64ul, 64ul, 3) == CODE);
    EXPECT(FN(cuMemAllocAsync)(&other, MIB, NULL) == CODE);
    EXPECT(FN(cuMemCreate)(&other, MIB, &on_device, 0ul) == CODE);
    EXPECT(FN(cuArray3DCreate_v2)(&other, &shape) == CODE);
    EXPECT(other == 77);
    EXPECT(FN(cuMemFree_v2)(base) == CODE);
    EXPECT(FN(cuMemFreeAsync)(ordered, NULL) == CODE);
    EXPECT(FN(cuMemRelease)(handle) == CODE);
    EXPECT(launch(0, 0, 0, NULL) == CODE);
    EXPECT(FN(cuLaunchKernelEx)(&config, NULL, NULL, NULL) == CODE);
    EXPECT(FN(cuGraphLaunch)(NULL, NULL) == CODE);
    EXPECT(FN(cuLaunchHostFunc)(NULL, start, NULL) == CODE);
    EXPECT(FN(cuPointerGetAttribute)(&other, 0x7fff, base) == CODE);
    EXPECT(free_bytes() == before);
    answers(0);
    CHECK(FN(cuLaunchKernelEx)(&config, NULL, NULL, NULL));
    CHECK(FN(cuMemFree_v2)(base));
    CHECK(FN(cuMemFreeAsync)(ordered, NULL));
    CHECK(FN(cuMemRelease)(handle));
    EXPECT(free_bytes() == before + 3 * MIB);
    return 0;
}
