/* Memory is freed while a kernel uses it, also beside an open capture: the kernel, and a copy behind it, find it as it was. */
#include "guest.h"
#define KEPT (448 * MIB)
#define PART (64 * MIB)
#define SEEN 64
int main(void) {
    start();
    load_kernel();
    void *stream, *capturing, *graph;
    CHECK(FN(cuStreamCreate)(&stream, 1));
    CHECK(FN(cuStreamCreate)(&capturing, 1));
    uint64_t kept = alloc(KEPT), results = alloc(4 * MIB);
    CHECK(FN(cuMemsetD32_v2)(kept, 0, KEPT / 4));
    CHECK(FN(cuMemsetD32_v2)(results, 0, MIB));
    CHECK(FN(cuCtxSynchronize)());
    uint32_t rounds = 0, seen[SEEN];
    do {
        uint64_t part = alloc(PART);
        CHECK(FN(cuMemsetD32Async)(part, rounds, PART / 4, stream));
        CHECK(launch(part, PART / 4, 8000, stream));
        CHECK(FN(cuMemcpyDtoDAsync_v2)(results + rounds % SEEN * 4, part + PART - 4, 4ul, stream));
        CHECK(launch(kept, KEPT / 4, 1000, stream));
        int captures = rounds % 3 == 2;
        if (captures) CHECK(FN(cuStreamBeginCapture_v2)(capturing, 2));
        CHECK(FN(cuMemFree_v2)(part));
        EXPECT(FN(cuMemFree_v2)(part) != 0);
        if (captures) {
            CHECK(FN(cuStreamEndCapture)(capturing, &graph));
            CHECK(FN(cuGraphDestroy)(graph));
        }
        rounds++;
    } while (rounds < SEEN || goes_on());
    CHECK(FN(cuStreamSynchronize)(stream));
    CHECK(FN(cuMemcpyDtoH_v2)(seen, results, sizeof seen));
    for (uint32_t i = 0; i < SEEN; i++) {
        uint32_t last = rounds - 1 - (rounds - 1 - i) % SEEN;
        if (seen[i] != last + 1) { fprintf(stderr, "round %u left %u\n", last, seen[i]); return 1; }
    }
    EXPECT(holds(kept, KEPT, 2 * MIB, rounds));
    return 0;
}
