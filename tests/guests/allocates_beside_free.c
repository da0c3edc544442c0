/* Memory of one context is freed beside a capture while another context has work, so it can only end later. Then a thread waits for a place
   in a full queue of that other context. The queue is held by a function of the host that waits for an allocation in the first context:
   that allocation has nothing to do with the queue. What was freed is there when the other context's work has come so far. */
#include "guest.h"
#include "waits.h"
#include "full.h"
#define BYTES (600 * MIB)
int main(void) {
    pthread_t thread;
    void *capturing, *graph;
    uint64_t memory;
    start();
    alloc(64 * MIB);
    memory = alloc(BYTES);
    CHECK(FN(cuStreamCreate)(&capturing, 1));
    CHECK(FN(cuCtxCreate_v2)(&other, 0, 0));
    load_kernel();
    CHECK(FN(cuStreamCreate)(&full, 1));
    CHECK(launch(0, 0, 1, full));
    CHECK(FN(cuCtxSynchronize)());
    CHECK(launch(0, 0, 1000000, full));
    CHECK(FN(cuCtxSetCurrent)(context));
    CHECK(FN(cuStreamBeginCapture_v2)(capturing, 2));
    CHECK(FN(cuMemFree_v2)(memory));
    CHECK(FN(cuStreamEndCapture)(capturing, &graph));
    CHECK(FN(cuGraphDestroy)(graph));
    CHECK(FN(cuCtxSetCurrent)(other));
    let_wait(1, full);
    CHECK(FN(cuCtxSetCurrent)(context));
    thread = fill();
    alloc(64 * MIB);
    alloc(512);
    free_bytes();
    ready = 1;
    CHECK(pthread_join(thread, NULL));
    alloc(BYTES);
    return 0;
}
