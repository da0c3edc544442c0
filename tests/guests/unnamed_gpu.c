/* The driver does not say which GPU the second device is. Each way to allocate there answers alike (argument), and the first device gives memory. */
#include "guest.h"
struct properties { int type, handles, location_type, location_id; void *security; char flags[24]; };
struct array { size_t width, height, depth; int format; unsigned channels, flags; };

int main(int argc, char **argv) {
    EXPECT(argc == 2);
    int answer = atoi(argv[1]);
    start();
    void *second, *stream, *pool;
    CHECK(FN(cuDevicePrimaryCtxRetain)(&second, 1));
    CHECK(FN(cuCtxSetCurrent)(second));
    CHECK(FN(cuStreamCreate)(&stream, 1));
    uint64_t base;
    size_t pitch;
    struct properties on_second = {.type = 1, .location_type = 1, .location_id = 1};
    struct array shape = {1024, 1024, 16, 0x01, 1, 0};
    EXPECT(FN(cuMemAlloc_v2)(&base, 16 * MIB) == answer);
    EXPECT(FN(cuMemAllocManaged)(&base, 16 * MIB, 1) == answer);
    EXPECT(FN(cuMemAllocPitch_v2)(&base, &pitch, 16 * MIB, 1ul, 4) == answer);
    EXPECT(FN(cuMemCreate)(&base, 16 * MIB, &on_second, 0ul) == answer);
    EXPECT(FN(cuArray3DCreate_v2)(&base, &shape) == answer);
    CHECK(FN(cuCtxSetCurrent)(context));
    EXPECT(FN(cuMemAllocAsync)(&base, 16 * MIB, stream) == answer);
    int of_second[32] = {1, 0, 1, 1};
    CHECK(FN(cuMemPoolCreate)(&pool, of_second));
    EXPECT(FN(cuMemAllocFromPoolAsync)(&base, 16 * MIB, pool, stream) == answer);
    CHECK(FN(cuMemFree_v2)(alloc(16 * MIB)));
    return 0;
}
