/* Memory is freed while a kernel uses it and a capture is open, so it can only end later. From then on the program allocates nothing, and
   works with what little it has. */
#include "guest.h"
#define FREED (600 * MIB)
#define KEPT (4 * MIB)
int main(void) {
    void *stream, *capturing, *graph;
    uint64_t freed, kept;
    uint32_t rounds = 0;
    start();
    load_kernel();
    CHECK(FN(cuStreamCreate)(&stream, 1));
    CHECK(FN(cuStreamCreate)(&capturing, 1));
    freed = alloc(FREED);
    kept = alloc(KEPT);
    CHECK(FN(cuMemsetD32_v2)(kept, 0, KEPT / 4));
    CHECK(FN(cuCtxSynchronize)());
    while (access(getenv("WAKE"), F_OK)) usleep(1000);
    CHECK(launch(freed, FREED / 4, 1000000, stream));
    CHECK(FN(cuStreamBeginCapture_v2)(capturing, 2));
    CHECK(FN(cuMemFree_v2)(freed));
    CHECK(FN(cuStreamEndCapture)(capturing, &graph));
    CHECK(FN(cuGraphDestroy)(graph));
    do {
        CHECK(launch(kept, KEPT / 4, 1000, stream));
        CHECK(FN(cuStreamSynchronize)(stream));
        rounds++;
    } while (goes_on());
    return !counts(kept, rounds);
}
