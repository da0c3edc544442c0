/* Two GPUs, 100 MiB of each for the tenant: a process counts on the right GPU, whichever GPUs it sees, in any order. */
#include "guest.h"
static void use(int device) {
    CHECK(FN(cuDevicePrimaryCtxRetain)(&context, device));
    CHECK(FN(cuCtxSetCurrent)(context));
}
int main(int argc, char **argv) {
    CHECK(FN(cuInit)(0));
    if (argc > 1) {
        int count = 0;
        CHECK(FN(cuDeviceGetCount)(&count));
        EXPECT(count == 1);
        use(0);
        size_t left = free_bytes();
        printf("%lu", left / MIB);
        EXPECT(FN(cuMemAlloc_v2)(&(uint64_t){0}, left + 1) == 2);
        return 0;
    }
    use(0);
    alloc(10 * MIB);
    EXPECT(free_bytes() == 90 * MIB);
    use(1);
    alloc(60 * MIB);
    EXPECT(free_bytes() == 40 * MIB);
    const char *sees[] = {"0", "1", "1"}, *limits[] = {"100m", "100m", "80m"}, *said[] = {"90", "40", "20"};
    for (int i = 0; i < 3; i++) {
        char what[16] = {0};
        int out[2], status;
        EXPECT(pipe(out) == 0);
        pid_t pid = fork();
        if (pid == 0) {
            setenv("CUDA_VISIBLE_DEVICES", sees[i], 1), setenv("NVSHARE_MEM_LIMIT_0", limits[i], 1);
            dup2(out[1], 1), execl(argv[0], argv[0], "sees one", NULL);
        }
        EXPECT(waitpid(pid, &status, 0) == pid);
        CHECK(status);
        EXPECT(read(out[0], what, sizeof what - 1) > 0);
        if (strcmp(what, said[i])) { fprintf(stderr, "%s instead of %s\n", what, said[i]); return 1; }
    }
    return 0;
}
