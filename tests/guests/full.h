/* A thread that fills a stream's queue in another context, and waits there for a place. Needs `waits.h`. */
#include "asleep.h"
static volatile int launches;
static volatile pid_t filler;
static void *other, *full;
static void *fills(void *argument) {
    filler = this_thread();
    CHECK(FN(cuCtxSetCurrent)(other));
    for (int i = 0; i < 1100; i++) {
        CHECK(launch(0, 0, 0, full));
        launches++;
    }
    CHECK(FN(cuStreamSynchronize)(full));
    return argument;
}
/* Begins it behind a function of the host, and returns when it waits. */
static pthread_t fill(void) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, fills, NULL));
    while (launches < 1015) usleep(100);
    until_asleep(&filler);
    return thread;
}
