/* Two threads capture, each on its own default stream. Both streams have the same name: the end of one capture is not that of
   the other. */
#include "guest.h"
static volatile int began, ended, calls;
static void count(void *data) { (void)data; __sync_fetch_and_add(&calls, 1); }
static void *first(void *argument) {
    void *graph;
    CHECK(FN(cuCtxSetCurrent)(context));
    CHECK(FN(cuStreamBeginCapture_v2)((void *)2, 1));
    while (!began) usleep(100);
    CHECK(FN(cuStreamEndCapture)((void *)2, &graph));
    ended = 1;
    return argument;
}
int main(void) {
    start();
    load_kernel();
    uint64_t memory = alloc(MIB);
    CHECK(launch(memory, 64, 10, NULL));
    CHECK(FN(cuCtxSynchronize)());
    pthread_t thread;
    void *graph, *exec, *stream;
    CHECK(pthread_create(&thread, NULL, first, NULL));
    CHECK(FN(cuStreamBeginCapture_v2)((void *)2, 1));
    began = 1;
    while (!ended) usleep(100);
    CHECK(launch(memory, 64, 10, (void *)2));
    CHECK(FN(cuLaunchHostFunc)((void *)2, count, NULL));
    CHECK(FN(cuStreamEndCapture)((void *)2, &graph));
    CHECK(pthread_join(thread, NULL));
    EXPECT(calls == 0);
    CHECK(FN(cuGraphInstantiateWithFlags)(&exec, graph, 0ul));
    CHECK(FN(cuStreamCreate)(&stream, 1));
    for (int i = 0; i < 3; i++) CHECK(FN(cuGraphLaunch)(exec, stream));
    CHECK(FN(cuStreamSynchronize)(stream));
    EXPECT(calls == 3);
    return 0;
}
