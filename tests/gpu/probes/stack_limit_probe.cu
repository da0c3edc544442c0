// What a smaller stack (cuCtxSetLimit) takes off the card before the driver's checkpoint, and what it costs to set it back after.
// nvcc -std=c++17 -arch=native stack_limit_probe.cu -lcuda -o stack_limit_probe ; ./stack_limit_probe STACK_BYTES SMALL(0|1)
#include <cuda.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <unistd.h>
#include <vector>
static double now() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
#define CK(x) do { CUresult r_ = (x); if (r_) { printf("%s: %d\n", #x, (int)r_); fflush(stdout); } } while (0)
static size_t free_mib() { size_t f, t; CK(cuMemGetInfo(&f, &t)); return f >> 20; }
// 4 KiB of each thread in local memory: the place is chosen at run time.
__global__ void deep(unsigned *out, unsigned seed) {
    unsigned words[1024], at = blockIdx.x * blockDim.x + threadIdx.x;
    for (int i = 0; i < 1024; i++) words[i] = at + seed + i;
    unsigned place = (at * 7 + seed) & 1023, sum = 0;
    for (int i = 0; i < 64; i++) { words[(place + i * 13) & 1023] += i; sum += words[(place + i * 29) & 1023]; }
    out[at] = sum;
}
int main(int count, char **arguments) {
    size_t stack = count > 1 ? atoi(arguments[1]) : 1024;
    bool small = count > 2 && atoi(arguments[2]);
    CUcontext context;
    CK(cuInit(0)); CK(cuDevicePrimaryCtxRetain(&context, 0)); CK(cuCtxSetCurrent(context));
    double begin = now(); size_t before = free_mib(); printf("first cuMemGetInfo %.2f ms", (now() - begin) * 1e3);
    begin = now(); free_mib(); printf(", second %.3f ms\n", (now() - begin) * 1e3);
    if (stack != 1024) CK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, stack));
    const unsigned N = 132 * 256; CUdeviceptr out; CK(cuMemAlloc(&out, N * 4));
    CUstream s; CK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
    deep<<<132, 256, 0, (cudaStream_t)s>>>((unsigned *)out, 5); CK(cuStreamSynchronize(s));
    std::vector<unsigned> want(N), got(N); CK(cuMemcpyDtoH(want.data(), out, N * 4));
    CUgraph graph; CUgraphExec exec;
    CK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_RELAXED)); deep<<<132, 256, 0, (cudaStream_t)s>>>((unsigned *)out, 5); CK(cuStreamEndCapture(s, &graph)); CK(cuGraphInstantiate(&exec, graph, 0));
    CK(cuGraphLaunch(exec, s)); CK(cuStreamSynchronize(s));
    printf("context took %zd MiB since the first look; stack %zu\n", (ssize_t)before - (ssize_t)free_mib(), stack);
    for (int cycle = 0; cycle < 5; cycle++) {
        size_t old = 0, least = 0; double a = now(); size_t f0 = free_mib(), f1 = 0;
        CK(cuCtxGetLimit(&old, CU_LIMIT_STACK_SIZE)); double b = now();
        if (small) { CK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 0)); CK(cuCtxGetLimit(&least, CU_LIMIT_STACK_SIZE)); f1 = free_mib(); } double c = now();
        CUcheckpointLockArgs l; memset(&l, 0, sizeof l); l.timeoutMs = 5000; CUcheckpointCheckpointArgs k; memset(&k, 0, sizeof k); CUcheckpointRestoreArgs r; memset(&r, 0, sizeof r); CUcheckpointUnlockArgs u; memset(&u, 0, sizeof u);
        double d = now(); CK(cuCheckpointProcessLock(getpid(), &l)); CK(cuCheckpointProcessCheckpoint(getpid(), &k)); double e = now();
        usleep(50000); double g = now(); CK(cuCheckpointProcessRestore(getpid(), &r)); CK(cuCheckpointProcessUnlock(getpid(), &u)); double h = now();
        size_t f2 = free_mib(); double i = now(); if (small) CK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, old)); double j = now(); size_t f3 = free_mib();
        int wrong = 0; double t0 = now();
        CK(cuMemsetD8Async(out, 0, N * 4, s)); CK(cuGraphLaunch(exec, s)); CK(cuStreamSynchronize(s)); double t1 = now(); CK(cuMemcpyDtoH(got.data(), out, N * 4)); wrong += got != want;
        CK(cuMemsetD8Async(out, 0, N * 4, s)); deep<<<132, 256, 0, (cudaStream_t)s>>>((unsigned *)out, 5); CK(cuStreamSynchronize(s)); CK(cuMemcpyDtoH(got.data(), out, N * 4)); wrong += got != want;
        size_t after = 0; CK(cuCtxGetLimit(&after, CU_LIMIT_STACK_SIZE));
        printf("stack %zu->%zu->%zu, free MiB %zu small %zu woke %zu back %zu; set small %.2f ms, out %.0f ms, in %.0f ms, set back %.2f ms, first graph %.2f ms, wrong %d\n", old, least, after, f0, f1, f2, f3, (c - b) * 1e3, (e - d) * 1e3, (h - g) * 1e3, (j - i) * 1e3, (t1 - t0) * 1e3, wrong);
        fflush(stdout);
    }
    return 0;
}
