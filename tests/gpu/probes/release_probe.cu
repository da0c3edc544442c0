// What another process's copies to the card lose while this one unmaps, releases, creates or maps memory: which of these calls makes them stand still.
// nvcc -std=c++17 -arch=native release_probe.cu -lcuda -o release_probe ; ./release_probe [PIECE_MIB] [GIB]
#include <cuda.h>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>
static double now() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
#define CK(x) do { CUresult r_ = (x); if (r_) { printf("%s: %d\n", #x, (int)r_); fflush(stdout); _exit(1); } } while (0)
static const size_t M = 1ull << 20;
struct Shared { std::atomic<int> ready, stop; std::atomic<size_t> copied; };
// Copies pieces of 32 MiB one after the other, four under way, and counts those that are over.
static void copier(Shared *s) {
    CUcontext c; CK(cuInit(0)); CK(cuDevicePrimaryCtxRetain(&c, 0)); CK(cuCtxSetCurrent(c));
    const size_t P = 32 * M; char *host; CUdeviceptr to; CK(cuMemHostAlloc((void **)&host, 32 * P, 0)); CK(cuMemAlloc(&to, 32 * P));
    CUstream stream; CK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CUevent events[4]; for (auto &e : events) CK(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
    for (size_t i = 0;; i++) {
        if (i >= 4) { while (cuEventQuery(events[i % 4]) == CUDA_ERROR_NOT_READY) {} s->copied += P; }
        if (i == 64) s->ready = 1;
        if (s->stop) break;
        CK(cuMemcpyHtoDAsync(to + i % 32 * P, host + i % 32 * P, P, stream)); CK(cuEventRecord(events[i % 4], stream));
    }
    CK(cuCtxSynchronize()); _exit(0);
}
int main(int count, char **arguments) {
    setvbuf(stdout, nullptr, _IONBF, 0);
    const size_t piece = (count > 1 ? atoi(arguments[1]) : 32) * M, n = (count > 2 ? atoi(arguments[2]) : 6) * 1024 * M / piece;
    auto *s = (Shared *)mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t child = fork(); if (!child) copier(s);
    CUcontext c; CK(cuInit(0)); CK(cuDevicePrimaryCtxRetain(&c, 0)); CK(cuCtxSetCurrent(c));
    CUmemAllocationProp pr; memset(&pr, 0, sizeof pr); pr.type = CU_MEM_ALLOCATION_TYPE_PINNED; pr.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    CUmemAccessDesc ad{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr base; CK(cuMemAddressReserve(&base, n * piece, 2 * M, 0, 0)); std::vector<CUmemGenericAllocationHandle> h(n);
    auto create = [&](size_t i) { CK(cuMemCreate(&h[i], piece, &pr, 0)); };
    auto release = [&](size_t i) { CK(cuMemRelease(h[i])); };
    auto map = [&](size_t i) { CK(cuMemMap(base + i * piece, piece, 0, h[i], 0)); CK(cuMemSetAccess(base + i * piece, piece, &ad, 1)); };
    auto unmap = [&](size_t i) { CK(cuMemUnmap(base + i * piece, piece)); };
    for (size_t i = 0; i < n; i++) create(i), map(i);
    CK(cuMemsetD8(base, 1, n * piece)); CK(cuCtxSynchronize());
    while (!s->ready) usleep(1000);
    auto measure = [&](const char *what, auto call, int pause_us = 0) {
        usleep(100000);
        double a = now(); size_t x = s->copied; usleep(200000); double rate = (s->copied - x) / (now() - a);
        double begin = now(); size_t before = s->copied; double inside = 0;
        for (size_t i = 0; i < n; i++) { double q = now(); call(i); inside += now() - q; if (pause_us) { double w = now(); while (now() - w < pause_us * 1e-6) {} } }
        // The copies of a moment after count as well: what stood still is late then.
        double over = now(); while (now() - over < 0.02) {}
        double took = now() - begin; size_t copied = s->copied - before; double lost = took - copied / rate;
        printf("%-44s %4zu x %zu MiB: calls %.1f us each, %.2f ms in sum; copies %.1f GiB/s alone, lost %.2f ms\n", what, n, piece / M, inside / n * 1e6, inside * 1e3, rate / (1024 * M), lost * 1e3);
    };
    for (int round = 0; round < 3; round++) {
        measure("nothing", [&](size_t) { double q = now(); while (now() - q < 60e-6) {} });
        measure("unmap", [&](size_t i) { unmap(i); });
        measure("map", [&](size_t i) { map(i); });
        measure("unmap and map the same", [&](size_t i) { unmap(i); map(i); });
        for (size_t i = 0; i < n; i++) unmap(i);
        measure("release what is unmapped", [&](size_t i) { release(i); });
        measure("create", [&](size_t i) { create(i); });
        for (size_t i = 0; i < n; i++) map(i);
        CK(cuMemsetD8(base, 1, n * piece)); CK(cuCtxSynchronize());
        measure("unmap and release", [&](size_t i) { unmap(i); release(i); });
        measure("create and map", [&](size_t i) { create(i); map(i); });
        CK(cuMemsetD8(base, 1, n * piece)); CK(cuCtxSynchronize());
        measure("unmap and release, pauses of 100 us", [&](size_t i) { unmap(i); release(i); }, 100);
        for (size_t i = 0; i < n; i++) create(i), map(i);
        CK(cuMemsetD8(base, 1, n * piece)); CK(cuCtxSynchronize());
    }
    s->stop = 1; int status; waitpid(child, &status, 0); return 0;
}
