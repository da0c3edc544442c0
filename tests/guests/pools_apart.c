/* What one pool keeps serves no other pool: an allocation of that takes memory of its own. 100 MiB are allowed, and each allocation has 60. */
#include "guest.h"
#define BYTES (60 * MIB)
static struct { int type, handles, location, device; uint64_t rest[9]; } on_device = {.type = 1, .location = 1};
static void *stream;

static void *pool_that_keeps(void) {
    void *pool;
    uint64_t all = ~0ul;
    CHECK(FN(cuMemPoolCreate)(&pool, &on_device));
    CHECK(FN(cuMemPoolSetAttribute)(pool, 4, &all));
    return pool;
}

/* Memory of a pool, or else of the current one. It is all that the program has then: what other pools have kept has given way. */
static uint64_t take(void *pool) {
    uint64_t memory;
    if (pool) CHECK(FN(cuMemAllocFromPoolAsync)(&memory, BYTES, pool, stream));
    else CHECK(FN(cuMemAllocAsync)(&memory, BYTES, stream));
    EXPECT(free_bytes() == 100 * MIB - BYTES);
    return memory;
}

static void give(uint64_t memory) {
    CHECK(FN(cuMemFreeAsync)(memory, stream));
    CHECK(FN(cuStreamSynchronize)(stream));
}

int main(void) {
    start();
    CHECK(FN(cuStreamCreate)(&stream, 1));
    EXPECT(free_bytes() == 100 * MIB);
    void *pools[] = {pool_that_keeps(), pool_that_keeps(), NULL};
    for (int i = 0; i < 6; i++) give(take(pools[i % 3]));
    /* What a pool has kept itself does serve it, also where it is the current one. */
    CHECK(FN(cuDeviceSetMemPool)(0, pools[1]));
    for (int i = 0; i < 2; i++) {
        uint64_t memory = take(pools[2 * i]);
        give(memory);
        EXPECT(take(pools[2 * i]) == memory);
        give(memory);
    }
    return 0;
}
