/* Memory of one context is freed in the order of a stream there, and then a thread waits for a place in that stream's full queue. The queue is
   held by a function of the host that waits for an allocation in another context: that allocation has nothing to do with the queue. When the
   stream has reached the free, the memory is there for the other context, though nothing else is done in its own. */
#include "guest.h"
#include "waits.h"
#include "full.h"
#define BYTES (600 * MIB)
int main(void) {
    pthread_t thread;
    uint64_t memory;
    start();
    alloc(64 * MIB);
    CHECK(FN(cuCtxCreate_v2)(&other, 0, 0));
    load_kernel();
    CHECK(FN(cuStreamCreate)(&full, 1));
    CHECK(launch(0, 0, 1, full));
    CHECK(FN(cuCtxSynchronize)());
    memory = alloc(BYTES);
    let_wait(1, full);
    CHECK(FN(cuMemFreeAsync)(memory, full));
    CHECK(FN(cuCtxSetCurrent)(context));
    thread = fill();
    alloc(64 * MIB);
    ready = 1;
    CHECK(pthread_join(thread, NULL));
    alloc(BYTES);
    return 0;
}
