/* Launches of one context wait for its launch window, and then a thread waits for a place in a full queue there. The queue is held by a function
   of the host that waits for a launch in another context. The test says by the files ONE, TWO and THREE that another client waits, that none
   does, and that one does again. */
#include "guest.h"
#include "waits.h"
#include "full.h"
static void until(const char *variable) {
    const char *file = getenv(variable);
    EXPECT(file);
    while (access(file, F_OK) != 0) usleep(1000);
}
int main(void) {
    pthread_t thread;
    start();
    load_kernel();
    void *own = step_function;
    alloc(448 * MIB);
    CHECK(launch(0, 0, 1, NULL));
    CHECK(FN(cuCtxCreate_v2)(&other, 0, 0));
    load_kernel();
    CHECK(FN(cuStreamCreate)(&full, 1));
    CHECK(launch(0, 0, 1, full));
    CHECK(launch(0, 0, 1, NULL));
    CHECK(FN(cuCtxSynchronize)());
    let_wait(1, full);
    printf("ready\n"), fflush(stdout);
    until("ONE");
    for (int i = 0; i < 20; i++) CHECK(launch(0, 0, 1, NULL));
    printf("launched\n"), fflush(stdout);
    until("TWO");
    thread = fill();
    printf("full\n"), fflush(stdout);
    until("THREE");
    CHECK(FN(cuCtxSetCurrent)(context));
    CHECK(launch_of(own, 0, 0, 1, NULL));
    ready = 1;
    CHECK(pthread_join(thread, NULL));
    return 0;
}
