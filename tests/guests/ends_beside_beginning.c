/* A stream ends, and its work goes on, while another thread is about to begin a capture. The memory of that work is freed beside
   the capture: the work finds it as it was. */
#include "guest.h"
#define BYTES (64 * MIB)
static void *capturing;
static void *begin(void *none) {
    CHECK(FN(cuCtxSetCurrent)(context));
    CHECK(FN(cuStreamBeginCapture_v2)(capturing, 2));
    return none;
}
int main(void) {
    const char *held = held_file();
    char waits[512];
    void *ending, *graph;
    uint32_t seen = 0;
    pthread_t thread;
    EXPECT(held);
    snprintf(waits, sizeof waits, "%s.waits", held);
    start();
    load_kernel();
    CHECK(FN(cuStreamCreate)(&capturing, 1));
    CHECK(FN(cuStreamCreate)(&ending, 1));
    uint64_t memory = alloc(BYTES), result = alloc(4 * MIB);
    CHECK(FN(cuMemsetD32_v2)(memory, 0, BYTES / 4));
    CHECK(FN(cuMemsetD32_v2)(result, 0, MIB));
    CHECK(FN(cuCtxSynchronize)());
    fclose(fopen(held, "w"));
    CHECK(pthread_create(&thread, NULL, begin, NULL));
    while (access(waits, F_OK)) usleep(1000);
    CHECK(launch(memory, BYTES / 4, 1000000, ending));
    CHECK(FN(cuMemcpyDtoDAsync_v2)(result, memory + BYTES - 4, 4ul, ending));
    CHECK(FN(cuStreamDestroy_v2)(ending));
    CHECK(unlink(held));
    CHECK(pthread_join(thread, NULL));
    CHECK(FN(cuMemFree_v2)(memory));
    CHECK(FN(cuStreamEndCapture)(capturing, &graph));
    CHECK(FN(cuGraphDestroy)(graph));
    CHECK(FN(cuCtxSynchronize)());
    CHECK(FN(cuMemcpyDtoH_v2)(&seen, result, sizeof seen));
    EXPECT(seen == 1);
    return 0;
}
