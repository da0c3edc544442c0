/* A child of a process without CUDA uses CUDA; a child of a process with CUDA does not hang; both processes start a program. */
#include "guest.h"
static void wait_for(pid_t pid) {
    int status = 0;
    EXPECT(waitpid(pid, &status, 0) == pid);
    CHECK(status);
}
static void run_true(void) {
    pid_t pid = vfork();
    if (pid == 0) { execlp("true", "true", NULL); _exit(127); }
    wait_for(pid);
}
int main(void) {
    pid_t pid = fork();
    if (pid == 0) {
        start();
        load_kernel();
        uint64_t base = alloc(4 * MIB);
        CHECK(launch(base, 64, 100, NULL));
        CHECK(FN(cuCtxSynchronize)());
        _exit(0);
    }
    wait_for(pid);
    run_true();
    start();
    load_kernel();
    uint64_t base = alloc(4 * MIB);
    CHECK(launch(base, 64, 100, NULL));
    pid = fork();
    if (pid == 0) {
        /* The driver cannot be used here; the library must not stand in the way of its answer, or of the end. */
        size_t left, total;
        FN(cuMemGetInfo_v2)(&left, &total);
        exit(0);
    }
    wait_for(pid);
    run_true();
    CHECK(launch(base, 64, 100, NULL));
    CHECK(FN(cuCtxSynchronize)());
    return 0;
}
