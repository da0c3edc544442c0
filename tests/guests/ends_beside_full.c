/* Beside captures, a stream of one context ends with work in flight, and then a thread waits for a place in a full queue there. The queue
   is held by a function of the host that waits for the end of a stream in another context, which has nothing to do with it. */
#include "guest.h"
#include "waits.h"
#include "full.h"
int main(void) {
    pthread_t thread;
    void *stream, *ended, *captures[2], *graph;
    start();
    load_kernel();
    CHECK(FN(cuStreamCreate)(&stream, 1));
    CHECK(launch(0, 0, 1, stream));
    CHECK(FN(cuCtxCreate_v2)(&other, 0, 0));
    load_kernel();
    CHECK(FN(cuStreamCreate)(&full, 1));
    CHECK(FN(cuStreamCreate)(&ended, 1));
    CHECK(launch(0, 0, 1, full));
    CHECK(launch(0, 0, 1, ended));
    CHECK(FN(cuCtxSynchronize)());
    for (int i = 0; i < 2; i++) {
        CHECK(FN(cuCtxSetCurrent)(i ? other : context));
        CHECK(FN(cuStreamCreate)(&captures[i], 1));
        CHECK(FN(cuStreamBeginCapture_v2)(captures[i], 2));
    }
    let_wait(1, full);
    CHECK(launch(0, 0, 100000, ended));
    CHECK(FN(cuStreamDestroy_v2)(ended));
    CHECK(FN(cuCtxSetCurrent)(context));
    thread = fill();
    CHECK(FN(cuStreamDestroy_v2)(stream));
    ready = 1;
    CHECK(pthread_join(thread, NULL));
    for (int i = 0; i < 2; i++) CHECK(FN(cuStreamEndCapture)(captures[i], &graph));
    return 0;
}
