/* A thread makes a slow allocation; another thread works meanwhile, so the program has the lock when the allocation is done. */
#include "guest.h"
#define BYTES (256 * MIB)
static uint64_t memory_;
static void *allocates(void *argument) {
    CHECK(FN(cuCtxSetCurrent)(context));
    memory_ = alloc(BYTES);
    return argument;
}
int main(void) {
    pthread_t thread;
    start();
    load_kernel();
    CHECK(pthread_create(&thread, NULL, allocates, NULL));
    /* The allocation is under way, and counts. */
    usleep(100000);
    CHECK(launch(0, 0, 0, NULL));
    CHECK(FN(cuCtxSynchronize)());
    CHECK(pthread_join(thread, NULL));
    do {
        CHECK(launch(memory_, BYTES / 4, 100, NULL));
        CHECK(FN(cuCtxSynchronize)());
    } while (goes_on());
    return 0;
}
