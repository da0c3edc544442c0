/* A function of the host waits for this thread, which allocates rows of a width that is new. */
#include "guest.h"
#include "waits.h"
int main(void) {
    void *stream;
    uint64_t rows;
    size_t pitch;
    start();
    CHECK(FN(cuStreamCreate)(&stream, 1));
    for (uint32_t round = 1; round <= 3; round++) {
        let_wait(round, stream);
        CHECK(FN(cuMemAllocPitch_v2)(&rows, &pitch, 1000ul * round, 2048ul, 4));
        ready = round;
        CHECK(FN(cuStreamSynchronize)(stream));
        CHECK(FN(cuMemFree_v2)(rows));
    }
    return 0;
}
