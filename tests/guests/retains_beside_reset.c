/* One thread resets the first card, whose work waits for another thread. That one retains the second card's context before it lets the work go on. */
#include "guest.h"
#include "waits.h"
#include "asleep.h"
static volatile pid_t resets;
static void *reset(void *unused) {
    (void)unused;
    resets = this_thread();
    CHECK(FN(cuDevicePrimaryCtxReset_v2)(0));
    return NULL;
}
int main(void) {
    void *stream, *other;
    pthread_t thread;
    start();
    CHECK(FN(cuStreamCreate)(&stream, 1));
    let_wait(1, stream);
    CHECK(pthread_create(&thread, NULL, reset, NULL));
    until_asleep(&resets);
    CHECK(FN(cuDevicePrimaryCtxRetain)(&other, 1));
    CHECK(FN(cuCtxSetCurrent)(other));
    ready = 1;
    CHECK(pthread_join(thread, NULL));
    return 0;
}
