/* Threads make streams, use and destroy them, some with work in flight, and pause long enough to look idle. A thread of the
   library that looks at a program's streams meets handles that end at any moment. Every launch counts. */
#include "guest.h"
#define THREADS 4
#define BYTES (600 * MIB)
static uint64_t memory;
static volatile long launched;
static void *work(void *argument) {
    unsigned seed = (unsigned)(uintptr_t)argument;
    CHECK(FN(cuCtxSetCurrent)(context));
    do {
        void *streams[6];
        int count = 1 + rand_r(&seed) % 6;
        for (int i = 0; i < count; i++) CHECK(FN(cuStreamCreate)(&streams[i], rand_r(&seed) % 2));
        for (int i = 0; i < 12; i++) {
            CHECK(launch(memory, 4, 50, streams[rand_r(&seed) % count]));
            __sync_fetch_and_add(&launched, 1);
        }
        if (rand_r(&seed) % 2)
            for (int i = 0; i < count; i++) CHECK(FN(cuStreamSynchronize)(streams[i]));
        if (rand_r(&seed) % 3 == 0) usleep(rand_r(&seed) % 12000);
        for (int i = 0; i < count; i++) CHECK(FN(cuStreamDestroy_v2)(streams[i]));
        if (rand_r(&seed) % 4 == 0) usleep(rand_r(&seed) % 60000);
    } while (goes_on());
    return argument;
}
int main(void) {
    start();
    load_kernel();
    memory = alloc(BYTES);
    CHECK(FN(cuMemsetD32_v2)(memory, 0, BYTES / 4));
    /* A fill may return before it is done, and non-blocking streams do not wait for it. */
    CHECK(FN(cuCtxSynchronize)());
    in_threads(THREADS, work);
    CHECK(FN(cuCtxSynchronize)());
    return !counts(memory, launched);
}
