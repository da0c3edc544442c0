/* All memory that is allowed is freed while kernels use it and a capture is open, or in the order of a stream, and allocated again at once. */
#include "guest.h"
#include "waits.h"
#define ALL (512 * MIB)
int main(void) {
    start();
    load_kernel();
    void *stream, *capturing, *graph;
    CHECK(FN(cuStreamCreate)(&stream, 1));
    CHECK(FN(cuStreamCreate)(&capturing, 1));
    for (int round = 0; round < 3; round++) {
        uint64_t a = alloc(ALL / 2), b = alloc(ALL / 2), refused;
        EXPECT(FN(cuMemAlloc_v2)(&refused, 4 * MIB) == 2);
        CHECK(launch(a, ALL / 8, 1000, stream));
        CHECK(launch(b, ALL / 8, 400000, stream));
        if (round > 0) CHECK(FN(cuStreamBeginCapture_v2)(capturing, 2));
        CHECK(FN(cuMemFree_v2)(a));
        CHECK(FN(cuMemFree_v2)(b));
        uint64_t c = alloc(ALL);
        if (round > 0) {
            CHECK(FN(cuStreamEndCapture)(capturing, &graph));
            CHECK(FN(cuGraphDestroy)(graph));
        }
        CHECK(launch(c, ALL / 4, 10, stream));
        CHECK(FN(cuStreamSynchronize)(stream));
        CHECK(FN(cuMemFree_v2)(c));
    }
    // The same in the order of a stream, while the device is idle and while another stream is busy for a while.
    for (int round = 0; round < 2; round++) {
        uint64_t a = alloc(ALL);
        CHECK(launch(a, ALL / 4, 10, stream));
        CHECK(FN(cuMemFreeAsync)(a, stream));
        CHECK(FN(cuStreamSynchronize)(stream));
        if (round > 0) CHECK(launch(0, 0, 400000, capturing));
        CHECK(FN(cuMemFree_v2)(alloc(ALL)));
    }
    // The work before the free is not over: an allocation waits for it if it fits then.
    uint64_t a = alloc(ALL), refused;
    let_wait(1, stream);
    CHECK(launch(a, ALL / 4, 400000, stream));
    CHECK(FN(cuMemFreeAsync)(a, stream));
    EXPECT(FN(cuMemAlloc_v2)(&refused, ALL + 4 * MIB) == 2);
    EXPECT(FN(cuStreamQuery)(stream) == 600);
    ready = 1;
    CHECK(FN(cuMemFree_v2)(alloc(ALL)));
    // So does small memory that was freed.
    uint64_t small[500];
    for (int i = 0; i < 500; i++) small[i] = alloc(MIB);
    CHECK(launch(small[0], MIB / 4, 400000, stream));
    for (int i = 0; i < 500; i++) CHECK(FN(cuMemFreeAsync)(small[i], stream));
    CHECK(FN(cuMemFree_v2)(alloc(ALL / 2)));
    return 0;
}
