// A managed range that becomes memory which can be shared, at the same address, while other threads map and unmap memory: can the address be held?
// The program stands in front of the C library's munmap and mmap for the thread that replaces a range. Then what the driver says of dma-bufs.
// g++ -O1 -std=c++17 -rdynamic replace_probe.cpp -I/usr/local/cuda/include -lcuda -ldl -lpthread -o replace_probe && ./replace_probe
#include <cuda.h>
#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <vector>

static const size_t M = 1ull << 20;
static double now() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
static CUresult show(const char *what, CUresult r) { const char *n = 0; cuGetErrorName(r, &n); if (r) printf("   %s -> %d %s\n", what, (int)r, n ? n : "?"); fflush(stdout); return r; }
#define CK(x) show(#x, (x))

static __thread uintptr_t held_from, held_to;   // the range that this thread holds
static __thread int is_armed;                   // 1: notes calls, 2: holds as well
static __thread char notes[4096]; static __thread int noted;
static void note(const char *format, ...) { va_list a; va_start(a, format); if (noted < 3900) noted += vsnprintf(notes + noted, 4000 - noted, format, a); va_end(a); }
static void *raw_mmap(void *at, size_t n, int prot, int flags, int fd, off_t o) { return (void *)syscall(SYS_mmap, at, n, prot, flags, fd, o); }
extern "C" int munmap(void *at, size_t n) {
    uintptr_t a = (uintptr_t)at;
    if (is_armed) note(" munmap %lx+%lx", (unsigned long)a, (unsigned long)n);
    if (is_armed == 2 && a < held_to && a + n > held_from) {
        note("(held)");
        return raw_mmap(at, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == at ? 0 : -1;
    }
    return syscall(SYS_munmap, at, n);
}
extern "C" void *mmap(void *at, size_t n, int prot, int flags, int fd, off_t o) {
    uintptr_t a = (uintptr_t)at;
    if (is_armed) note(" mmap %lx+%lx prot %x flags %x fd %d", (unsigned long)a, (unsigned long)n, prot, flags, fd);
    if (is_armed == 2 && a >= held_from && a + n <= held_to) { note("(over)"); flags = (flags & ~0x100000) | MAP_FIXED; }
    void *got = raw_mmap(at, n, prot, flags, fd, o);
    if (is_armed) note(" = %lx", (unsigned long)(uintptr_t)got);
    return got;
}
extern "C" void *mmap64(void *at, size_t n, int prot, int flags, int fd, off_t o) { return mmap(at, n, prot, flags, fd, o); }

static std::atomic<bool> stop{false};
static std::atomic<uintptr_t> hunted{0}, hunted_to{0}; static std::atomic<long> stolen{0}, tries{0};
static void *thief(void *) {
    while (!stop) {
        size_t n = (1 + tries % 64) * M;
        void *p = raw_mmap(0, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        uintptr_t a = (uintptr_t)p; tries++;
        if (hunted && a < hunted_to && a + n > hunted) stolen++;
        usleep(1);
        syscall(SYS_munmap, p, n);
    }
    return 0;
}
static void maps(uintptr_t at) {
    FILE *f = fopen("/proc/self/maps", "r"); char line[512];
    while (fgets(line, sizeof line, f)) { unsigned long a, b; if (sscanf(line, "%lx-%lx", &a, &b) == 2 && at >= a && at < b) printf("   in %s", line); }
    fclose(f);
}
static CUmemAllocationProp prop(bool fd, bool rdma) {
    CUmemAllocationProp p; memset(&p, 0, sizeof p); p.type = CU_MEM_ALLOCATION_TYPE_PINNED; p.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    if (fd) p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    if (rdma) p.allocFlags.gpuDirectRDMACapable = 1;
    return p;
}
static CUmemAccessDesc access_rw{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};

static bool replace(size_t b, int how, bool talk) {
    CUdeviceptr x, y = 0; if (CK(cuMemAllocManaged(&x, b, CU_MEM_ATTACH_GLOBAL))) return false;
    CK(cuMemsetD8(x, 5, b)); std::vector<char> h(b), k(b); CK(cuMemcpyDtoH(h.data(), x, b));
    if (talk) maps(x);
    size_t whole = (b + 2 * M - 1) / (2 * M) * (2 * M);
    noted = 0; notes[0] = 0; held_from = x; held_to = x + whole; hunted_to = x + whole; hunted = x;
    double t = now();
    is_armed = how; CUresult r1 = cuMemFree(x); int free_notes = noted;
    CUresult r2 = cuMemAddressReserve(&y, whole, 2 * M, x, 0); is_armed = 0;
    double d = now() - t; hunted = 0;
    bool same = !r1 && !r2 && y == x, right = false; int exported = -1;
    if (same) {
        CUmemAllocationProp p = prop(true, false); CUmemGenericAllocationHandle g; int fd = -1;
        CK(cuMemCreate(&g, whole, &p, 0)); CK(cuMemMap(y, whole, 0, g, 0)); CK(cuMemSetAccess(y, whole, &access_rw, 1)); CK(cuMemcpyHtoD(y, h.data(), b)); CK(cuMemcpyDtoH(k.data(), y, b));
        right = !memcmp(h.data(), k.data(), b); exported = cuMemExportToShareableHandle(&fd, g, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0); if (fd >= 0) close(fd);
        CK(cuMemUnmap(y, whole)); CK(cuMemRelease(g));
    }
    if (!r2) CK(cuMemAddressFree(y, whole));
    if (talk) { printf("  %4zu MiB at %llx, how %d: free %d, reserve %d %s, %.1f us, contents right %d, export %d\n", b / M, (unsigned long long)x, how, r1, r2, same ? "SAME" : "other", d * 1e6, right, exported); if (noted) printf("   notes:%.*s | then%s\n", free_notes, notes, notes + free_notes); fflush(stdout); }
    return same && right;
}

static void dma() {
    int has = -1, rdma = -1; CUdevice dev; cuDeviceGet(&dev, 0);
    CK(cuDeviceGetAttribute(&has, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, dev)); CK(cuDeviceGetAttribute(&rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, dev));
    printf(" dma-buf supported %d, rdma with vmm %d\n", has, rdma);
    auto ask = [](const char *what, CUdeviceptr p, size_t n) { for (unsigned long long flags : {0ull, 1ull}) { int fd = -1; double t = now(); CUresult r = cuMemGetHandleForAddressRange(&fd, p, n, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, flags); const char *e = 0; cuGetErrorName(r, &e);
        printf("  %-44s flags %llu: %d %s fd %d (%.0f us)\n", what, flags, (int)r, e, fd, (now() - t) * 1e6); if (fd >= 0) close(fd); } int cap = -1; CUresult r = cuPointerGetAttribute(&cap, CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE, p); unsigned sync = 1; CUresult s = cuPointerSetAttribute(&sync, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, p); printf("   rdma capable: %d (%d); sync memops %d\n", cap, r, s); fflush(stdout); };
    CUdeviceptr p; CK(cuMemAlloc(&p, 8 * M)); ask("cuMemAlloc 8 MiB", p, 8 * M); ask("cuMemAlloc, its second MiB", p + M, M); ask("cuMemAlloc, odd", p + 512, 4096); CK(cuMemFree(p));
    CK(cuMemAlloc(&p, 4096)); ask("cuMemAlloc 4 KiB", p, 4096); CK(cuMemFree(p));
    CK(cuMemAllocManaged(&p, 8 * M, CU_MEM_ATTACH_GLOBAL)); ask("managed", p, 8 * M); CK(cuMemFree(p));
    for (int way = 0; way < 4; way++) {
        CUmemAllocationProp q = prop(way & 1, way & 2); CUdeviceptr y; CUmemGenericAllocationHandle g[2]; CK(cuMemAddressReserve(&y, 8 * M, 2 * M, 0, 0));
        for (int i = 0; i < 2; i++) { CK(cuMemCreate(&g[i], 4 * M, &q, 0)); CK(cuMemMap(y + i * 4 * M, 4 * M, 0, g[i], 0)); } CK(cuMemSetAccess(y, 8 * M, &access_rw, 1));
        char name[64]; snprintf(name, sizeof name, "mapped,%s%s one chunk", way & 1 ? " fd" : "", way & 2 ? " rdma" : ""); ask(name, y, 4 * M); snprintf(name, sizeof name, "mapped,%s%s two chunks", way & 1 ? " fd" : "", way & 2 ? " rdma" : ""); ask(name, y, 8 * M);
        int fd = -1; CUresult r = cuMemGetHandleForAddressRange(&fd, y, 4 * M, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
        if (!r) { CUresult a = cuMemUnmap(y, 4 * M), b = cuMemRelease(g[0]); size_t f0, f1, t; cuMemGetInfo(&f0, &t); close(fd); cuMemGetInfo(&f1, &t); printf("   unmapped with the dma-buf open: %d %d; closing it freed %zu MiB\n", a, b, (f1 - f0) / M); CK(cuMemUnmap(y + 4 * M, 4 * M)); CK(cuMemRelease(g[1])); }
        else { CK(cuMemUnmap(y, 8 * M)); CK(cuMemRelease(g[0])); CK(cuMemRelease(g[1])); }
        CK(cuMemAddressFree(y, 8 * M));
    }
}

int main() {
    CUdevice dev; CUcontext ctx; CK(cuInit(0)); CK(cuDeviceGet(&dev, 0)); CK(cuDevicePrimaryCtxRetain(&ctx, dev)); CK(cuCtxSetCurrent(ctx));
    CUdeviceptr keep[4]; for (auto &k : keep) CK(cuMemAllocManaged(&k, 2 * M, CU_MEM_ATTACH_GLOBAL));
    size_t sizes[] = {1, 2, 4, 8, 16, 20, 24, 32, 48, 64, 256, 1024};
    for (size_t s : sizes) replace(s * M, 1, true);
    printf(" with the range held\n"); for (size_t s : sizes) replace(s * M, 2, true);
    pthread_t th[4]; for (auto &t : th) pthread_create(&t, 0, thief, 0);
    for (int how : {1, 2}) for (size_t s : {32, 64, 256}) { int good = 0; stolen = 0; long before = tries; for (int i = 0; i < 60; i++) good += replace(s * M, how, false); printf(" %zu MiB beside four threads that map, %s: %d of 60 at the same address; %ld of %ld mappings lay in the range\n", s, how == 2 ? "held" : "not held", good, (long)stolen, (long)(tries - before)); fflush(stdout); }
    stop = true; for (auto &t : th) pthread_join(t, 0);
    dma();
}
