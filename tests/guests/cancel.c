/* Threads that submit are cancelled, and others jump away with a call in progress: the gate forgets them, and turns go on. */
#include "guest.h"
static uint64_t memory;
static void *work(void *argument) {
    (void)argument;
    CHECK(FN(cuCtxSetCurrent)(context));
    for (;;) {
        CHECK(launch(memory, 64, 10, NULL));
        usleep(100);
    }
}
static sigjmp_buf out;
static void jump(int number) { (void)number; siglongjmp(out, 1); }

int main(void) {
    start();
    load_kernel();
    memory = alloc(600 * MIB);
    signal(SIGUSR1, jump);
    do {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, work, NULL));
        CHECK(launch(memory, 600 * MIB / 4, 2000, NULL));
        usleep(1000);
        CHECK(pthread_cancel(thread));
        CHECK(pthread_join(thread, NULL));
        if (sigsetjmp(out, 1) == 0) {
            launch(memory, 64, 1, NULL);
            raise(SIGUSR1);
        }
        CHECK(launch(memory, 600 * MIB / 4, 20000, NULL));
        CHECK(FN(cuCtxSynchronize)());
    } while (goes_on());
    CHECK(FN(cuCtxSynchronize)());
    return 0;
}
