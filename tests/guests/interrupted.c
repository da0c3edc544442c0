/* A signal comes while a thread sleeps at the gate: `interrupted jumps|stays`. Its handler jumps out of the call, which the thread then makes
   once more. Or it lasts while the file GO is there, and the thread sleeps on. */
#include "guest.h"
#include "asleep.h"
static uint64_t memory_;
static const char *go_;
static sigjmp_buf out_;
static volatile pid_t worker_;
static void jump(int number) { (void)number; siglongjmp(out_, 1); }
static void stay(int number) {
    (void)number;
    if (write(1, "interrupted\n", 12) != 12) _exit(1);
    while (access(go_, F_OK) == 0) usleep(1000);
}
static void call(void) {
    CHECK(launch(memory_, 64, 1, NULL));
    CHECK(FN(cuCtxSynchronize)());
}
static void *work(void *none) {
    worker_ = this_thread();
    CHECK(FN(cuCtxSetCurrent)(context));
    if (sigsetjmp(out_, 1) == 0) {
        call();
    } else {
        printf("interrupted\n"), fflush(stdout);
        call();
    }
    printf("has worked again\n"), fflush(stdout);
    while (goes_on()) usleep(1000);
    return none;
}
int main(int count, char **arguments) {
    EXPECT(count == 2);
    const char *wake = getenv("WAKE");
    go_ = getenv("GO");
    EXPECT(wake && go_);
    start();
    load_kernel();
    memory_ = alloc(16 * MIB);
    signal(SIGUSR1, strcmp(arguments[1], "jumps") ? stay : jump);
    call();
    printf("has worked\n"), fflush(stdout);
    while (access(wake, F_OK) != 0) usleep(1000);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, work, NULL));
    while (access(go_, F_OK) != 0) usleep(1000);
    /* The thread has asked for the lock. When it sleeps, it holds nothing. */
    until_asleep(&worker_);
    CHECK(pthread_kill(thread, SIGUSR1));
    CHECK(pthread_join(thread, NULL));
    return 0;
}
