/* Callbacks that call CUDA, under turns: the calls neither sleep at the gate nor wait for room. */
#include "guest.h"
static volatile int ran;
static void host_func(void *data) {
    size_t left, total;
    FN(cuMemGetInfo_v2)(&left, &total);
    launch(*(uint64_t *)data, 0, 10, NULL);
    uint64_t base;
    if (FN(cuMemAlloc_v2)(&base, MIB) == 0) FN(cuMemFree_v2)(base);
    /* The driver refuses it: the free would wait for this callback. */
    EXPECT(FN(cuMemFree_v2)(*(uint64_t *)data) == 800);
    __sync_fetch_and_add(&ran, 1);
}
static void callback(void *stream, int status, void *data) { (void)stream, (void)status; host_func(data); }

int main(void) {
    start();
    load_kernel();
    uint64_t memory = alloc(600 * MIB);
    void *stream;
    CHECK(FN(cuStreamCreate)(&stream, 1));
    int i = 0;
    for (; i < 200 || goes_on(); i++) {
        if (i % 8 == 0) CHECK(FN(cuStreamSynchronize)(stream));
        CHECK(launch(memory, 600 * MIB / 4, 5000, stream));
        CHECK(i % 2 ? FN(cuLaunchHostFunc)(stream, host_func, &memory) : FN(cuStreamAddCallback)(stream, callback, &memory, 0));
    }
    CHECK(FN(cuStreamSynchronize)(stream));
    EXPECT(ran == i);
    EXPECT(FN(cuStreamAddCallback)((void *)0xdead0, callback, &memory, 0) != 0);
    return 0;
}
