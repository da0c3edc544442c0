/* Managed memory has no IPC handle: the driver refuses, and from then on allocations and pools get memory that has one. */
#include "guest.h"

/* Whether the memory of a new pool is managed. It says so with NVSHARE_DISGUISE=0. */
static unsigned new_pool_is_managed(void) {
    int of_device[32] = {1, 0, 1, 0};
    void *pool;
    uint64_t base;
    unsigned is;
    CHECK(FN(cuMemPoolCreate)(&pool, of_device));
    CHECK(FN(cuMemAllocFromPoolAsync)(&base, 4 * MIB, pool, NULL));
    CHECK(FN(cuPointerGetAttribute)(&is, 8, base));
    CHECK(FN(cuMemFreeAsync)(base, NULL));
    CHECK(FN(cuMemPoolDestroy)(pool));
    return is;
}

/* Memory of a default pool has no handle, natively too. The program has other memory afterwards, until it is told to stop. */
static void of_a_pool(void) {
    char handle[64];
    uint64_t pooled;
    CHECK(FN(cuMemAllocAsync)(&pooled, 4 * MIB, NULL));
    EXPECT(FN(cuIpcGetMemHandle)(handle, pooled) == 1);
    alloc(256 * MIB);
    CHECK(FN(cuMemAllocAsync)(&pooled, 8 * MIB, NULL));
    while (goes_on()) usleep(1000);
}

/* It would have this handle without the library. */
static void refused(void) {
    char handle[64];
    EXPECT(FN(cuIpcGetMemHandle)(handle, alloc(4 * MIB)) == 1);
    while (goes_on()) usleep(1000);
}

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "refused")) {
        start();
        refused();
        return 0;
    }
    if (argc > 1 && !strcmp(argv[1], "of a pool")) {
        start();
        of_a_pool();
        return 0;
    }
    unsigned moves = argc < 2;
    start();
    EXPECT(new_pool_is_managed() == moves);
    char handle[64];
    uint64_t first = alloc(4 * MIB);
    EXPECT(FN(cuIpcGetMemHandle)(handle, first) == (moves ? 1 : 0));
    uint64_t second = alloc(4 * MIB);
    CHECK(FN(cuIpcGetMemHandle)(handle, second));
    EXPECT(!new_pool_is_managed());
    CHECK(FN(cuMemFree_v2)(first));
    CHECK(FN(cuMemFree_v2)(second));
    return 0;
}
