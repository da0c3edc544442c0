/* A small allocation is made and freed over and over, and takes no new mapping; what is kept for that is in nobody's way: not
 * in the sums that the program sees, nor where it allocates all that it may. */
#include "guest.h"
#define LIMIT (64 * MIB)
#define TIMES 1000

static uint64_t mappings(void) {
    uint64_t count = 0;
    CHECK(FN(nvsimMapped)(&count));
    return count;
}

static void use(uint64_t at, size_t bytes, uint32_t value) {
    static uint32_t words[256];
    EXPECT(bytes <= sizeof words);
    CHECK(FN(cuMemsetD32_v2)(at, value, bytes / 4));
    CHECK(FN(cuMemcpyDtoH_v2)(words, at, bytes));
    for (size_t i = 0; i < bytes / 4; i++) EXPECT(words[i] == value);
}

int main(int argc, char **argv) {
    start();
    size_t before = free_bytes();
    uint64_t first = alloc(1024), at_first;
    use(first, 1024, 7);
    EXPECT(before - free_bytes() == 2 * MIB);
    CHECK(FN(cuMemFree_v2)(first));
    EXPECT(free_bytes() == before);
    at_first = mappings();
    EXPECT(at_first > 0);
    int made = 0;
    for (int i = 0; i < TIMES; i++) {
        uint64_t at = alloc(1024);
        if (i % 100 == 0) {
            use(at, 1024, i);
            EXPECT(before - free_bytes() == 2 * MIB);
        }
        CHECK(FN(cuMemFree_v2)(at));
    }
    made = mappings() - at_first;
    if (made > 10) { fprintf(stderr, "%d mappings\n", made); return 1; }
    EXPECT(free_bytes() == before);
    /* Two slabs, of which one is kept. */
    uint64_t a = alloc(2 * MIB - 512), b = alloc(2 * MIB - 512);
    EXPECT(before - free_bytes() == 4 * MIB);
    CHECK(FN(cuMemFree_v2)(a));
    CHECK(FN(cuMemFree_v2)(b));
    EXPECT(free_bytes() == before);
    if (argc == 1) return 0;
    /* All that the limit allows is there, and no more. */
    for (int i = 0; i < 20; i++) {
        uint64_t all = alloc(LIMIT), more;
        EXPECT(free_bytes() == 0);
        EXPECT(FN(cuMemAlloc_v2)(&more, 1024) == 2);
        CHECK(FN(cuMemFree_v2)(all));
        CHECK(FN(cuMemFree_v2)(alloc(1024)));
        /* With the kept slab in use, there is that much less. */
        all = alloc(LIMIT - 2 * MIB), more = alloc(1024);
        uint64_t third;
        EXPECT(FN(cuMemAlloc_v2)(&third, 2 * MIB) == 2);
        CHECK(FN(cuMemFree_v2)(more));
        CHECK(FN(cuMemFree_v2)(all));
        /* Physical memory and memory in stream order need the room as well. */
        CHECK(FN(cuMemFree_v2)(alloc(1024)));
        CHECK(FN(cuMemAllocAsync)(&all, LIMIT, NULL));
        CHECK(FN(cuMemFreeAsync)(all, NULL));
        CHECK(FN(cuStreamSynchronize)(NULL));
    }
    return 0;
}
