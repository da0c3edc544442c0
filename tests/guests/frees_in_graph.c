/* A function of the host in a graph frees memory: the driver refuses that, as the free would wait for the function itself. */
#include "guest.h"
static int answer = -1;
static void frees(void *data) { answer = FN(cuMemFree_v2)(*(uint64_t *)data); }
int main(void) {
    void *graph, *exec, *stream;
    start();
    load_kernel();
    uint64_t memory = alloc(64 * MIB);
    CHECK(FN(cuMemsetD32_v2)(memory, 0, 16 * MIB));
    CHECK(FN(cuCtxSynchronize)());
    CHECK(FN(cuStreamCreate)(&stream, 1));
    CHECK(FN(cuStreamBeginCapture_v2)(stream, 1));
    CHECK(FN(cuLaunchHostFunc)(stream, frees, &memory));
    CHECK(FN(cuStreamEndCapture)(stream, &graph));
    CHECK(FN(cuGraphInstantiateWithFlags)(&exec, graph, 0ul));
    CHECK(FN(cuGraphLaunch)(exec, stream));
    CHECK(FN(cuStreamSynchronize)(stream));
    EXPECT(answer == 800);
    CHECK(launch(memory, 4, 10, stream));
    CHECK(FN(cuStreamSynchronize)(stream));
    EXPECT(counts(memory, 1));
    CHECK(FN(cuMemFree_v2)(memory));
    return 0;
}
