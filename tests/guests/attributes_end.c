/* What a program sets of memory by a pointer, and the number by which it knows it, end with the free: memory that is allocated next has them
   as new memory has. A function of the host waits meanwhile, so what is freed in stream order is kept for the next allocation. */
#include "guest.h"
#include "waits.h"
#define BYTES (8 * MIB)
#define SLAB (2 * MIB)
static uint32_t setting(uint64_t memory) {
    uint32_t value = ~0u;
    CHECK(FN(cuPointerGetAttribute)(&value, 6, memory));
    return value;
}
static uint64_t number(uint64_t memory) {
    uint64_t one = 0, many = 0;
    int attribute = 7;
    void *place = &many;
    CHECK(FN(cuPointerGetAttribute)(&one, 7, memory));
    CHECK(FN(cuPointerGetAttributes)(1, &attribute, &place, memory));
    EXPECT(one == many);
    return one;
}
static void set(uint64_t memory) {
    uint32_t on = 1;
    CHECK(FN(cuPointerSetAttribute)(&on, 6, memory));
}
static void free_in_order(uint64_t memory, void *stream) {
    CHECK(FN(cuMemFreeAsync)(memory, stream));
    CHECK(FN(cuStreamSynchronize)(stream));
}
int main(void) {
    void *stream, *waits;
    start();
    CHECK(FN(cuStreamCreate)(&stream, 1));
    CHECK(FN(cuStreamCreate)(&waits, 1));
    uint64_t small[2] = {alloc(512), alloc(512)}, more;
    let_wait(1, waits);
    uint64_t first = alloc(BYTES), id = number(first);
    uint32_t fresh = setting(first);
    EXPECT(fresh == 0);
    free_in_order(first, stream);
    uint64_t again = alloc(BYTES);
    EXPECT(number(again) != id && setting(again) == fresh);
    printf("%s\n", again == first ? "again" : "anew");
    set(again + 4096);
    EXPECT(setting(again) == 1);
    free_in_order(again, stream);
    uint64_t last = alloc(BYTES);
    EXPECT(setting(last) == fresh && number(last) != id);
    ready = 1;
    CHECK(FN(cuStreamSynchronize)(waits));
    /* Small allocations may be parts of one piece of memory. */
    set(small[0]);
    CHECK(FN(cuMemFree_v2)(small[0]));
    more = alloc(512);
    EXPECT(more / SLAB != small[1] / SLAB || setting(more) == 0);
    CHECK(FN(cuMemFree_v2)(more));
    CHECK(FN(cuMemFree_v2)(small[1]));
    return 0;
}
