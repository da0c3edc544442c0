/* Allocations and frees beside an open capture, large and small. The driver refuses them unless the thread or the capture is RELAXED, and
 * they break the capture. */
#include "guest.h"
#define RELAXED 2
static const size_t SIZES[] = {4 * MIB, 1024};
static void *stream_;
static void begin(int mode) { CHECK(FN(cuStreamBeginCapture_v2)(stream_, mode)); }
static void ends(int answer) {
    void *graph = NULL;
    EXPECT(FN(cuStreamEndCapture)(stream_, &graph) == answer && !graph == (answer != 0));
}
static int exchange(int mode) { CHECK(FN(cuThreadExchangeStreamCaptureMode)(&mode)); return mode; }
static void *allocate_beside(void *expected) {
    uint64_t base = 0;
    CHECK(FN(cuCtxSetCurrent)(context));
    EXPECT(FN(cuMemAlloc_v2)(&base, 4 * MIB) == (long)expected);
    if (base) CHECK(FN(cuMemFree_v2)(base));
    return NULL;
}
static void in_thread(long expected) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, allocate_beside, (void *)expected));
    CHECK(pthread_join(thread, NULL));
}
int main(void) {
    start();
    CHECK(FN(cuStreamCreate)(&stream_, 1));
    uint64_t base;
    size_t pitch;
    /* The pitch of these rows is known afterwards. */
    CHECK(FN(cuMemAllocPitch_v2)(&base, &pitch, MIB, 4ul, 4));
    for (int i = 0; i < 2; i++) {
        uint64_t memory = alloc(SIZES[i]);
        for (int mode = 0; mode < RELAXED; mode++) {
            begin(mode);
            EXPECT(FN(cuMemAlloc_v2)(&base, SIZES[i]) == 900);
            ends(901);
            begin(mode);
            EXPECT(FN(cuMemFree_v2)(memory) == 900);
            ends(901);
            begin(mode);
            EXPECT(FN(cuMemAllocPitch_v2)(&base, &pitch, MIB, 4ul, 4) == 900);
            ends(901);
            begin(mode);
            EXPECT(exchange(RELAXED) == 0);
            base = alloc(SIZES[i]);
            CHECK(FN(cuMemFree_v2)(base));
            EXPECT(exchange(0) == RELAXED);
            ends(0);
            begin(mode);
            in_thread(mode == 0 ? 900 : 0);
            ends(mode == 0 ? 901 : 0);
        }
        begin(RELAXED);
        base = alloc(SIZES[i]);
        CHECK(FN(cuMemFree_v2)(base));
        ends(0);
        CHECK(FN(cuMemFree_v2)(memory));
    }
    return 0;
}
