/* The program's signal handlers and mask stay its own, and hundreds of signals disturb nothing. */
#include "guest.h"
static volatile int count;
static void handler(int number) { (void)number; __sync_fetch_and_add(&count, 1); }
int main(void) {
    signal(SIGUSR1, handler);
    signal(SIGUSR2, handler);
    sigset_t before, after;
    sigprocmask(SIG_SETMASK, NULL, &before);
    start();
    load_kernel();
    uint64_t base = alloc(64 * MIB);
    for (int i = 0; i < 200; i++) {
        CHECK(launch(base, 64, 1000, NULL));
        kill(getpid(), i % 2 ? SIGUSR1 : SIGUSR2);
    }
    CHECK(FN(cuCtxSynchronize)());
    EXPECT(count >= 100);
    sigprocmask(SIG_SETMASK, NULL, &after);
    /* Not by bytes: the C library fills in a part of them. */
    for (int number = 1; number < NSIG; number++)
        EXPECT(sigismember(&before, number) == sigismember(&after, number));
    struct sigaction now;
    sigaction(SIGUSR1, NULL, &now);
    EXPECT(now.sa_handler == handler);
    return 0;
}
