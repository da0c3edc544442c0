/* Memory is freed while it is away and a capture is open that another stream has joined, whose earlier work cannot be looked at
   until the capture ends. It ends behind a kernel that waits for the program's memory. */
#include "guest.h"
#define FREED (600 * MIB)
#define KEPT (4 * MIB)
static void say(const char *what) { puts(what); fflush(stdout); }
int main(void) {
    void *capturing, *joined, *begun, *over, *graph, *exec;
    start();
    load_kernel();
    CHECK(FN(cuStreamCreate)(&capturing, 1));
    CHECK(FN(cuStreamCreate)(&joined, 1));
    CHECK(FN(cuEventCreate)(&begun, 2));
    CHECK(FN(cuEventCreate)(&over, 2));
    uint64_t freed = alloc(FREED), kept = alloc(KEPT);
    CHECK(FN(cuMemsetD32_v2)(freed, 7, FREED / 4));
    CHECK(FN(cuMemsetD32_v2)(kept, 0, KEPT / 4));
    CHECK(FN(cuCtxSynchronize)());
    CHECK(launch(kept, KEPT / 4, 10, joined));
    CHECK(FN(cuCtxSynchronize)());
    say("ready");
    while (access(getenv("WAKE"), F_OK)) usleep(1000);
    CHECK(FN(cuStreamBeginCapture_v2)(capturing, 2));
    CHECK(FN(cuEventRecord)(begun, capturing));
    CHECK(FN(cuStreamWaitEvent)(joined, begun, 0));
    CHECK(FN(cuMemFree_v2)(freed));
    CHECK(launch(kept, KEPT / 4, 10, joined));
    CHECK(FN(cuEventRecord)(over, joined));
    CHECK(FN(cuStreamWaitEvent)(capturing, over, 0));
    CHECK(FN(cuStreamEndCapture)(capturing, &graph));
    CHECK(FN(cuGraphInstantiateWithFlags)(&exec, graph, 0ul));
    CHECK(FN(cuGraphLaunch)(exec, capturing));
    CHECK(FN(cuStreamSynchronize)(capturing));
    return !counts(kept, 2);
}
