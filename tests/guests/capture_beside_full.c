/* A capture begins in one context while a thread waits in another context for a place in a full queue. The queue is held by a
   function of the host that waits for the capture: a capture has nothing to do with another context. */
#include "guest.h"
static volatile int launches, captured;
static void *other, *others_step, *full;
static void waits(void *data) { while (!captured) usleep(100); (void)data; }
static void *fills(void *argument) {
    CHECK(FN(cuCtxSetCurrent)(other));
    CHECK(FN(cuLaunchHostFunc)(full, waits, NULL));
    for (int i = 0; i < 1100; i++) {
        CHECK(launch_of(others_step, 0, 0, 0, full));
        launches++;
    }
    CHECK(FN(cuStreamSynchronize)(full));
    return argument;
}
int main(void) {
    void *stream, *graph, *exec;
    pthread_t thread;
    start();
    load_kernel();
    void *step = step_function;
    uint64_t memory = alloc(600 * MIB);
    CHECK(FN(cuStreamCreate)(&stream, 0));
    CHECK(launch(memory, 4, 1, stream));
    CHECK(FN(cuCtxSynchronize)());
    CHECK(FN(cuCtxCreate_v2)(&other, 0, 0));
    load_kernel();
    others_step = step_function;
    CHECK(FN(cuStreamCreate)(&full, 1));
    CHECK(launch(0, 0, 1, full));
    CHECK(FN(cuCtxSynchronize)());
    CHECK(FN(cuCtxSetCurrent)(context));
    CHECK(pthread_create(&thread, NULL, fills, NULL));
    /* The next launch waits. */
    while (launches < 1020) usleep(100);
    puts("full");
    fflush(stdout);
    while (access(getenv("GO"), F_OK)) usleep(1000);
    CHECK(FN(cuStreamBeginCapture_v2)(stream, 0));
    CHECK(launch_of(step, memory, 4, 10, stream));
    CHECK(FN(cuStreamEndCapture)(stream, &graph));
    captured = 1;
    CHECK(pthread_join(thread, NULL));
    CHECK(FN(cuGraphInstantiateWithFlags)(&exec, graph, 0ul));
    CHECK(FN(cuGraphLaunch)(exec, stream));
    CHECK(FN(cuStreamSynchronize)(stream));
    return 0;
}
