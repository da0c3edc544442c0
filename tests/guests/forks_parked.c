/* Children are forked while memory may be on the host: they end, whatever they call, and nothing changes for the parent. */
#include "guest.h"
#define BYTES (512 * MIB)
int main(void) {
    start();
    load_kernel();
    uint64_t memory = alloc(BYTES);
    CHECK(FN(cuMemsetD32_v2)(memory, 0, BYTES / 4));
    uint32_t rounds = 0;
    do {
        CHECK(launch(memory, BYTES / 4, 1000, NULL));
        CHECK(FN(cuCtxSynchronize)());
        rounds++;
        usleep(100000);
        pid_t pid = fork();
        if (pid == 0) {
            alarm(120);
            uint64_t base;
            size_t left, total;
            EXPECT(FN(cuMemGetInfo_v2)(&left, &total) != 0);
            EXPECT(FN(cuMemFree_v2)(memory) != 0);
            EXPECT(FN(cuMemAlloc_v2)(&base, 4 * MIB) != 0);
            if (rounds % 2) _exit(0);
            exit(0);
        }
        int status = 1;
        EXPECT(waitpid(pid, &status, 0) == pid);
        CHECK(status);
    } while (goes_on());
    EXPECT(holds(memory, BYTES, 2 * MIB, rounds));
    return 0;
}
