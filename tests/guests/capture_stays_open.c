/* A capture stays open longer than a turn lasts: the library drains and checks for idleness beside it, and does not break it.
   */
#include "guest.h"
int main(void) {
    void *streams[2];
    start();
    load_kernel();
    uint64_t memory = alloc(600 * MIB);
    CHECK(FN(cuMemsetD32_v2)(memory, 0, 600 * MIB / 4));
    for (int i = 0; i < 2; i++) CHECK(FN(cuStreamCreate)(&streams[i], i));
    CHECK(launch(memory, 4, 1, streams[0]));
    CHECK(FN(cuCtxSynchronize)());
    int round = 0;
    do {
        void *graph, *exec, *stream = streams[round++ % 2];
        CHECK(FN(cuStreamBeginCapture_v2)(stream, 2));
        CHECK(launch(memory, 4, 10, stream));
        usleep(250000);
        CHECK(launch(memory, 4, 10, stream));
        CHECK(FN(cuStreamEndCapture)(stream, &graph));
        CHECK(FN(cuGraphInstantiateWithFlags)(&exec, graph, 0ul));
        CHECK(FN(cuGraphLaunch)(exec, stream));
        CHECK(FN(cuStreamSynchronize)(stream));
        CHECK(FN(cuGraphExecDestroy)(exec));
        CHECK(FN(cuGraphDestroy)(graph));
        for (int i = 0; i < 100; i++) {
            CHECK(launch(memory, 600 * MIB / 4, 2000, stream));
            CHECK(FN(cuStreamSynchronize)(stream));
        }
    } while (goes_on());
    return 0;
}
