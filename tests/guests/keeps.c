/* Memory that the driver keeps is counted: of a pool whose allocations are freed, and of graphs. It gives way to new
   allocations. */
#include "guest.h"
#include "waits.h"

static void *graph_that_allocates(void *stream, size_t bytes, uint32_t micros) {
    uint64_t base;
    void *graph, *exec;
    CHECK(FN(cuStreamBeginCapture_v2)(stream, 2));
    CHECK(FN(cuMemAllocAsync)(&base, bytes, stream));
    CHECK(launch(base, bytes / 4, micros, stream));
    CHECK(FN(cuStreamEndCapture)(stream, &graph));
    CHECK(FN(cuGraphInstantiateWithFlags)(&exec, graph, 0ul));
    return exec;
}

int main(int argc, char **argv) {
    start();
    load_kernel();
    void *pool, *stream;
    uint64_t a, b, all = ~0ul;
    CHECK(FN(cuStreamCreate)(&stream, 1));
    CHECK(FN(cuDeviceGetDefaultMemPool)(&pool, 0));
    CHECK(FN(cuMemPoolSetAttribute)(pool, 4, &all));
    void *current;
    CHECK(FN(cuDeviceGetMemPool)(&current, 0));
    EXPECT(current == pool);
    CHECK(FN(cuDeviceSetMemPool)(0, pool));
    CHECK(FN(cuDeviceGetMemPool)(&current, 0));
    EXPECT(current == pool && FN(cuMemPoolDestroy)(pool) == 1);
    if (argc > 1 && !strcmp(argv[1], "refused")) {
        /* The pool keeps all of it when the driver refuses an allocation. */
        CHECK(FN(cuMemAllocAsync)(&a, 60 * MIB, stream));
        CHECK(FN(cuMemFreeAsync)(a, stream));
        FILE *file = fopen(getenv("NVSIM_LOST"), "w");
        EXPECT(file && fprintf(file, "1 0 %s", getenv("REFUSED")) > 0 && !fclose(file));
        EXPECT(FN(cuMemAllocAsync)(&a, 50 * MIB, stream) == 1);
        printf("refused\n"), fflush(stdout);
        while (goes_on()) usleep(1000);
        return 0;
    }
    if (argc > 1) {
        /* 600 MiB that nobody uses are in nobody's way. */
        CHECK(FN(cuMemAllocAsync)(&a, 600 * MIB, stream));
        CHECK(FN(cuMemFreeAsync)(a, stream));
        CHECK(launch(alloc(4 * MIB), 64, 1, NULL));
        CHECK(FN(cuCtxSynchronize)());
        printf("kept\n"), fflush(stdout);
        while (goes_on()) usleep(1000);
        return 0;
    }
    EXPECT(free_bytes() == 100 * MIB);
    CHECK(FN(cuMemAllocAsync)(&a, 60 * MIB, stream));
    CHECK(FN(cuMemFreeAsync)(a, stream));
    EXPECT(free_bytes() == 40 * MIB);
    CHECK(FN(cuMemAllocAsync)(&a, 60 * MIB, stream));
    EXPECT(free_bytes() == 40 * MIB);
    EXPECT(FN(cuMemAlloc_v2)(&b, 41 * MIB) == 2);
    CHECK(FN(cuMemFree_v2)(a));
    EXPECT(free_bytes() == 40 * MIB);
    b = alloc(80 * MIB);
    EXPECT(free_bytes() == 20 * MIB);
    CHECK(FN(cuMemFree_v2)(b));
    EXPECT(free_bytes() == 100 * MIB);

    /* Memory that the pool hands out again does not count twice. */
    CHECK(FN(cuMemAllocAsync)(&a, 34 * MIB, stream));
    CHECK(FN(cuMemFreeAsync)(a, stream));
    CHECK(FN(cuMemAllocAsync)(&a, 34 * MIB, stream));
    b = alloc(66 * MIB);
    EXPECT(FN(cuMemAlloc_v2)(&(uint64_t){0}, 1) == 2);
    CHECK(FN(cuMemFreeAsync)(a, stream));
    EXPECT(free_bytes() == 0);
    CHECK(FN(cuStreamSynchronize)(stream));
    CHECK(FN(cuMemPoolTrimTo)(pool, 0ul));
    EXPECT(free_bytes() == 34 * MIB);
    CHECK(FN(cuMemFree_v2)(b));

    void *exec = graph_that_allocates(stream, 50 * MIB, 10), *slow = graph_that_allocates(stream, 50 * MIB, 1500000);
    EXPECT(free_bytes() == 100 * MIB);
    for (int i = 0; i < 3; i++) CHECK(FN(cuGraphLaunch)(exec, stream));
    EXPECT(free_bytes() == 50 * MIB);
    CHECK(FN(cuStreamSynchronize)(stream));
    b = alloc(80 * MIB);
    EXPECT(free_bytes() == 20 * MIB);
    /* Nobody knows beforehand how much a graph takes: the first launch is over the limit, the next one is refused. */
    CHECK(FN(cuGraphLaunch)(slow, stream));
    EXPECT(FN(cuGraphLaunch)(exec, stream) == 2);
    CHECK(FN(cuStreamSynchronize)(stream));
    CHECK(FN(cuMemFree_v2)(b));
    CHECK(FN(cuGraphLaunch)(exec, stream));
    CHECK(FN(cuStreamSynchronize)(stream));
    /* A graph that can never fit is refused at once. */
    void *graph;
    CHECK(FN(cuStreamBeginCapture_v2)(stream, 2));
    EXPECT(FN(cuMemAllocAsync)(&a, 101 * MIB, stream) == 2);
    CHECK(FN(cuStreamEndCapture)(stream, &graph));
    /* Memory of cuMemAlloc can be freed in order as well. */
    CHECK(FN(cuDeviceGraphMemTrim)(0));
    b = alloc(4 * MIB);
    let_wait(1, stream);
    CHECK(launch(b, 64, 300000, stream));
    CHECK(FN(cuMemFreeAsync)(b, stream));
    EXPECT(FN(cuMemFreeAsync)(b, stream) != 0);
    EXPECT(free_bytes() == 96 * MIB);
    ready = 1;
    CHECK(FN(cuStreamSynchronize)(stream));
    /* The memory ends soon after, at a moment at which the device has nothing to do. */
    for (int i = 0; i < 60000 && free_bytes() != 100 * MIB; i++) usleep(1000);
    EXPECT(free_bytes() == 100 * MIB);
    return 0;
}
