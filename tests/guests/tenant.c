/* Processes of one run share 100 MiB: together they never exceed it, and the memory of a killed process is free at once. */
#include "guest.h"

static void join(void) { start(); EXPECT(free_bytes() <= 100 * MIB); }

/* Allocates one MiB after the other. Returns how many there were. */
static int fill(void) {
    uint64_t base;
    int count = 0, result;
    while ((result = FN(cuMemAlloc_v2)(&base, MIB)) == 0) count++;
    EXPECT(result == 2);
    return count;
}

static pid_t child(const char *self, const char *what, int out, int in) {
    pid_t pid = fork();
    if (pid == 0) {
        dup2(out, 1), dup2(in, 0);
        execl(self, self, what, NULL);
        _exit(127);
    }
    return pid;
}

int main(int argc, char **argv) {
    if (argc > 1) {
        join();
        int count = 30;
        if (strcmp(argv[1], "hold") == 0) {
            uint64_t base;
            EXPECT(FN(cuMemAlloc_v2)(&base, 50 * MIB) == 2);
            alloc(30 * MIB);
            EXPECT(free_bytes() == 10 * MIB);
        } else {
            count = fill();
        }
        EXPECT(write(1, &count, sizeof count) == sizeof count);
        char byte;
        read(0, &byte, 1);
        return 0;
    }
    int out[2], in[2], count = 0, sum = 0, status;
    EXPECT(pipe(out) == 0 && pipe(in) == 0);
    /* Children first: a process that has used the driver had better not fork. */
    pid_t holder;
    join();
    /* Whatever this process keeps of it is in no other one's way. */
    CHECK(FN(cuMemFree_v2)(alloc(1000)));
    alloc(60 * MIB);
    holder = child(argv[0], "hold", out[1], in[0]);
    EXPECT(read(out[0], &count, sizeof count) == sizeof count && count == 30);
    EXPECT(free_bytes() == 10 * MIB);
    kill(holder, SIGKILL);
    waitpid(holder, &status, 0);
    for (int i = 0; free_bytes() != 40 * MIB; i++) { EXPECT(i < 20000); usleep(1000); }
    pid_t pids[8];
    for (int i = 0; i < 8; i++) pids[i] = child(argv[0], "fill", out[1], in[0]);
    for (int i = 0; i < 8; i++) { EXPECT(read(out[0], &count, sizeof count) == sizeof count); sum += count; }
    if (sum != 40) { fprintf(stderr, "%d MiB\n", sum); return 1; }
    EXPECT(free_bytes() == 0);
    close(in[1]);
    close(in[0]);
    for (int i = 0; i < 8; i++) kill(pids[i], SIGKILL), waitpid(pids[i], &status, 0);
    for (int i = 0; free_bytes() != 40 * MIB; i++) { EXPECT(i < 20000); usleep(1000); }
    return 0;
}
