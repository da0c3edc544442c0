/* An allocation on a stream is on the stream's GPU, whatever GPU is current: that GPU's limit holds (argument: its answer). */
#include "guest.h"

int main(int argc, char **argv) {
    CHECK(FN(cuInit)(0));
    void *contexts[2], *stream;
    for (int i = 0; i < 2; i++) CHECK(FN(cuDevicePrimaryCtxRetain)(&contexts[i], i));
    CHECK(FN(cuCtxSetCurrent)(contexts[1]));
    CHECK(FN(cuStreamCreate)(&stream, 1));
    CHECK(FN(cuCtxSetCurrent)(contexts[0]));
    uint64_t base;
    int answer = FN(cuMemAllocAsync)(&base, 128 * MIB, stream);
    EXPECT(answer == atoi(argv[1]));
    if (!answer) {
        int device = -1;
        CHECK(FN(cuPointerGetAttribute)(&device, 9, base));
        EXPECT(device == 1);
        CHECK(FN(cuMemFreeAsync)(base, stream));
        /* In a graph, memory of a pool is on the pool's GPU, whatever stream is captured. */
        int on_second[32] = {1, 0, 1, 1};
        void *pool, *captured, *graph, *exec;
        CHECK(FN(cuMemPoolCreate)(&pool, on_second));
        CHECK(FN(cuStreamCreate)(&captured, 1));
        CHECK(FN(cuStreamBeginCapture_v2)(captured, 2));
        CHECK(FN(cuMemAllocFromPoolAsync)(&base, 128 * MIB, pool, captured));
        CHECK(FN(cuStreamEndCapture)(captured, &graph));
        CHECK(FN(cuGraphInstantiateWithFlags)(&exec, graph, 0ul));
        CHECK(FN(cuGraphLaunch)(exec, captured));
        CHECK(FN(cuStreamSynchronize)(captured));
        CHECK(FN(cuPointerGetAttribute)(&device, 9, base));
        EXPECT(device == 1);
    }
    return 0;
}
