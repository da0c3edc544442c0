/* A million allocations of all kinds from sixteen threads: at the end the accounts are as at the beginning. */
#include "guest.h"
struct properties { int type, handles, location_type, location_id; void *security; char flags[24]; };
struct array { size_t width, height, depth; int format; unsigned channels, flags; };
static int (*mem_alloc)(), (*mem_free)(), (*alloc_async)(), (*free_async)(), (*create)(), (*release)(), (*map)(), (*unmap)(), (*reserve)(), (*unreserve)(), (*array_create)(), (*array_destroy)();

static void *work(void *argument) {
    uint64_t seed = (uintptr_t)argument * 0x9e3779b97f4a7c15ul + 1;
    CHECK(FN(cuCtxSetCurrent)(context));
    for (int i = 0; i < 62500 / 4; i++) {
        uint64_t a, b, h, r, at;
        seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
        size_t bytes = (seed % 4096 + 1) * 512;
        struct properties on_device = {.type = 1, .location_type = 1};
        struct array shape = {seed % 100 + 1, 7, 1, 0x20, 1, 0};
        CHECK(mem_alloc(&a, bytes));
        CHECK(alloc_async(&b, bytes + 1, NULL));
        size_t whole = (seed % 4 + 1) * 2 * MIB;
        CHECK(reserve(&at, whole, 0ul, 0ul, 0ul));
        CHECK(create(&h, whole, &on_device, 0ul));
        CHECK(map(at, whole, 0ul, h, 0ul));
        CHECK(array_create(&r, &shape));
        CHECK(release(h));
        CHECK(mem_free(a));
        CHECK(seed & 64 ? free_async(b, NULL) : mem_free(b));
        CHECK(array_destroy(r));
        CHECK(unmap(at, whole));
        CHECK(unreserve(at, whole));
    }
    return NULL;
}

int main(void) {
    CHECK(FN(cuInit)(0));
    mem_alloc = FN(cuMemAlloc_v2), mem_free = FN(cuMemFree_v2), alloc_async = FN(cuMemAllocAsync), free_async = FN(cuMemFreeAsync);
    create = FN(cuMemCreate), release = FN(cuMemRelease), map = FN(cuMemMap), unmap = FN(cuMemUnmap);
    reserve = FN(cuMemAddressReserve), unreserve = FN(cuMemAddressFree);
    array_create = FN(cuArray3DCreate_v2), array_destroy = FN(cuArrayDestroy);
    uint64_t first = alloc(4096);
    size_t before = free_bytes();
    EXPECT(before < 1ul << 45);
    in_threads(16, work);
    fprintf(stderr, "%ld bytes are left over\n", (long)(before - free_bytes()));
    EXPECT(free_bytes() == before);
    CHECK(mem_free(first));
    /* With mapped memory it is a slab's last part; else it is charged its own size. */
    const char *memory = getenv("NVSHARE_MEMORY");
    EXPECT(free_bytes() == before + (memory && !strcmp(memory, "swap") ? 2 * MIB : 4096));
    return 0;
}
