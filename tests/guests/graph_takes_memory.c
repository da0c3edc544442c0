/* A graph allocates 600 MiB when it is launched. With an argument, another program has 512 MiB and gives the GPU nothing to do. */
#include "guest.h"
static int idle(void) {
    uint64_t memory = alloc(512 * MIB);
    CHECK(FN(cuMemsetD32_v2)(memory, 7, 128 * MIB));
    CHECK(FN(cuCtxSynchronize)());
    printf("has memory\n");
    fflush(stdout);
    while (goes_on()) usleep(1000);
    EXPECT(holds(memory, 512 * MIB, 2 * MIB, 7));
    return 0;
}
int main(int argc, char **argv) {
    (void)argv;
    void *stream, *graph, *exec;
    uint64_t memory;
    start();
    if (argc > 1) return idle();
    load_kernel();
    CHECK(FN(cuStreamCreate)(&stream, 1));
    CHECK(FN(cuStreamBeginCapture_v2)(stream, 2));
    CHECK(FN(cuMemAllocAsync)(&memory, 600 * MIB, stream));
    CHECK(launch(memory, 1024, 10, stream));
    CHECK(FN(cuMemFreeAsync)(memory, stream));
    CHECK(FN(cuStreamEndCapture)(stream, &graph));
    CHECK(FN(cuGraphInstantiateWithFlags)(&exec, graph, 0ul));
    for (int i = 0; i < 3; i++) CHECK(FN(cuGraphLaunch)(exec, stream));
    CHECK(FN(cuStreamSynchronize)(stream));
    return 0;
}
