// Pages of managed memory that hold nothing: what finding them, discarding them and bringing them back costs, who gets their
// memory, and what managed pools cost beside plain ones. One line an answer.
// c++ -std=c++17 -O2 -I $CUDA/include -o pages_probe pages_probe.cpp -ldl
#include <cuda.h>
#include <dlfcn.h>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <vector>
static void *lib;
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define cu(f) ((decltype(&f))dlsym(lib, TEXT(f)))
static const char *name(CUresult r) { const char *s = "?"; cu(cuGetErrorName)(r, &s); return s + (strncmp(s, "CUDA_", 5) ? 0 : 5); }
template <class F> static double ms(F f) { auto t = std::chrono::steady_clock::now(); f(); cu(cuCtxSynchronize)(); return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - t).count(); }
static double free_gib() { size_t f, t; cu(cuMemGetInfo)(&f, &t); return f / 1073741824.0; }
static double available_gib() { FILE *f = fopen("/proc/meminfo", "r"); char line[200]; long kib = 0; while (fgets(line, 200, f)) sscanf(line, "MemAvailable: %ld", &kib); fclose(f); return kib / 1048576.0; }
static double rss_gib() { FILE *f = fopen("/proc/self/status", "r"); char line[200]; long kib = 0; while (fgets(line, 200, f)) sscanf(line, "VmRSS: %ld", &kib); fclose(f); return kib / 1048576.0; }
static CUmemLocation at(CUmemLocationType type) { CUmemLocation l; memset(&l, 0, sizeof l); l.type = type; return l; }
static const size_t MIB = 1 << 20, GIB = 1 << 30, BLOCK = 2 * MIB;
// One group of threads looks at each block of 2 MiB and says so if it finds a bit that is set.
static const char *IN_USE = R"(.version 6.0
.target sm_60
.address_size 64
.visible .entry in_use(.param .u64 memory, .param .u64 flags) {
 .reg .u64 at, end, group, place; .reg .u32 t, g, any, x<16>; .reg .pred p, found;
 ld.param.u64 at, [memory]; mov.u32 g, %ctaid.x; mov.u32 t, %tid.x;
 mad.wide.u32 at, g, 2097152, at; add.u64 end, at, 2097152; mad.wide.u32 at, t, 16, at;
again:
 ld.global.v4.u32 {x0, x1, x2, x3}, [at]; ld.global.v4.u32 {x4, x5, x6, x7}, [at+4096];
 ld.global.v4.u32 {x8, x9, x10, x11}, [at+8192]; ld.global.v4.u32 {x12, x13, x14, x15}, [at+12288];
 or.b32 x0, x0, x1; or.b32 x2, x2, x3; or.b32 x4, x4, x5; or.b32 x6, x6, x7; or.b32 x8, x8, x9; or.b32 x10, x10, x11; or.b32 x12, x12, x13; or.b32 x14, x14, x15;
 or.b32 x0, x0, x2; or.b32 x4, x4, x6; or.b32 x8, x8, x10; or.b32 x12, x12, x14; or.b32 x0, x0, x4; or.b32 x8, x8, x12; or.b32 any, x0, x8;
 setp.ne.u32 p, any, 0; bar.red.or.pred found, 0, p; @found bra used;
 add.u64 at, at, 16384; setp.lt.u64 p, at, end; @p bra again;
 ret;
used:
 ld.param.u64 place, [flags]; mul.wide.u32 group, g, 1; add.u64 place, place, group; mov.u32 x0, 1; st.global.u8 [place], x0;
 ret;
}
)";

int main() {
  setvbuf(stdout, 0, _IOLBF, 0);
  lib = dlopen("libcuda.so.1", RTLD_NOW);
  cu(cuInit)(0); CUcontext c; cu(cuDevicePrimaryCtxRetain)(&c, 0); cu(cuCtxSetCurrent)(c);
  CUstream s; cu(cuStreamCreate)(&s, CU_STREAM_NON_BLOCKING);
  CUmemLocation dev = at(CU_MEM_LOCATION_TYPE_DEVICE), host = at(CU_MEM_LOCATION_TYPE_HOST);
  printf("# fresh managed memory, by one prefetch each\n");
  for (size_t n : {2 * MIB, 64 * MIB, GIB}) for (int round = 0; round < 3; round++) {
    CUdeviceptr x; cu(cuMemAllocManaged)(&x, n, CU_MEM_ATTACH_GLOBAL); double populated = ms([&] { cu(cuMemPrefetchAsync)(x, n, dev, 0, s); }); double again = ms([&] { cu(cuMemPrefetchAsync)(x, n, dev, 0, s); }); double freed = ms([&] { cu(cuMemFree)(x); });
    CUdeviceptr y; double alloc = ms([&] { cu(cuMemAlloc)(&y, n); }); double fill = ms([&] { cu(cuMemsetD8Async)(y, 1, n, s); }); double freed_plain = ms([&] { cu(cuMemFree)(y); });
    printf("  %zu MiB: populate %.2f ms, again %.2f, free %.2f; plain: alloc %.2f, fill %.2f, free %.2f\n", n / MIB, populated, again, freed, alloc, fill, freed_plain);
  }
  printf("# pools: allocate, fill, free, synchronise; ms each\n");
  for (int kind = 0; kind < 3; kind++) for (unsigned long long keep : {0ull, ~0ull}) for (size_t n : {1 * MIB, 64 * MIB, GIB}) {
    CUmemPoolProps props; memset(&props, 0, sizeof props); props.allocType = kind ? CU_MEM_ALLOCATION_TYPE_MANAGED : CU_MEM_ALLOCATION_TYPE_PINNED; props.location = dev; CUmemoryPool pool; CUresult r = cu(cuMemPoolCreate)(&pool, &props); cu(cuMemPoolSetAttribute)(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep);
    double f0 = free_gib(); CUdeviceptr x; cu(cuMemAllocFromPoolAsync)(&x, n, pool, s); cu(cuStreamSynchronize)(s); unsigned long long reserved; cu(cuMemPoolGetAttribute)(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved); double taken = f0 - free_gib(); cu(cuMemFreeAsync)(x, s); cu(cuCtxSynchronize)();
    const int rounds = 10; double t = ms([&] { for (int i = 0; i < rounds; i++) { cu(cuMemAllocFromPoolAsync)(&x, n, pool, s); if (kind == 2) cu(cuMemPrefetchAsync)(x, n, dev, 0, s); cu(cuMemsetD8Async)(x, i, n, s); cu(cuMemFreeAsync)(x, s); cu(cuStreamSynchronize)(s); } });
    printf("  %s, threshold %s, %zu MiB: %.3f ms (%s; reserved %llu MiB, untouched it took %.3f GiB)\n", kind == 0 ? "plain" : kind == 1 ? "managed" : "managed, prefetched", keep ? "all" : "0", n / MIB, t / rounds, name(r), reserved / MIB, taken); cu(cuMemPoolDestroy)(pool);
  }
  CUmemPoolProps props; memset(&props, 0, sizeof props); props.allocType = CU_MEM_ALLOCATION_TYPE_MANAGED; props.location = dev; CUmemoryPool pool, before; cu(cuMemPoolCreate)(&pool, &props); cu(cuDeviceGetMemPool)(&before, 0);
  printf("managed pool as the device's: %s;", name(cu(cuDeviceSetMemPool)(0, pool))); CUdeviceptr x; cu(cuStreamBeginCapture)(s, CU_STREAM_CAPTURE_MODE_RELAXED); CUresult r = cu(cuMemAllocAsync)(&x, MIB, s); printf(" allocation in a capture %s,", name(r)); CUgraph g = 0; printf(" its end %s;", name(cu(cuStreamEndCapture)(s, &g))); cu(cuDeviceSetMemPool)(0, before);
  CUmemAccessDesc access; access.location = dev; access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE; printf(" cuMemPoolSetAccess %s;", name(cu(cuMemPoolSetAccess)(pool, &access, 1))); CUmemAccess_flags flags; printf(" GetAccess %s;", name(cu(cuMemPoolGetAccess)(&flags, pool, &dev))); printf(" trim %s\n", name(cu(cuMemPoolTrimTo)(pool, 0)));

  printf("# blocks that hold nothing, 8 GiB\n");
  CUmodule m; CUfunction in_use; double load = ms([&] { r = cu(cuModuleLoadData)(&m, IN_USE); }); printf("module %s in %.1f ms, ", name(r), load); printf("function %s\n", name(cu(cuModuleGetFunction)(&in_use, m, "in_use")));
  const size_t n = 8 * GIB, blocks = n / BLOCK; unsigned char *found; cu(cuMemHostAlloc)((void **)&found, blocks, 0); CUdeviceptr w; cu(cuMemAllocManaged)(&w, n, CU_MEM_ATTACH_GLOBAL);
  double fill = ms([&] { cu(cuMemsetD8Async)(w, 0, n, s); }), fill2 = ms([&] { cu(cuMemsetD8Async)(w, 0, n, s); }); printf("filled by first touch in %.1f ms, again in %.1f ms\n", fill, fill2);
  // The last byte of every 64 MiB of the first half has a bit.
  auto in = [&](size_t b) { return b < blocks / 2 && b % 32 == 31; };
  for (size_t b = 0; b < blocks; b++) if (in(b)) cu(cuMemsetD8Async)(w + (b + 1) * BLOCK - 1, 128, 1, s);
  cu(cuCtxSynchronize)();
  auto scan = [&](const char *when) { memset(found, 0, blocks); double t = 0; for (size_t piece = 0; piece < 8; piece++) { CUdeviceptr base = w + piece * GIB; CUdeviceptr place = (CUdeviceptr)(found + piece * 512); void *a[] = {&base, &place}; t += ms([&] { cu(cuLaunchKernel)(in_use, 512, 1, 1, 256, 1, 1, 0, s, a, 0); }); } size_t wrong = 0, used = 0; for (size_t b = 0; b < blocks; b++) { wrong += found[b] != in(b); used += found[b]; } printf("%s: scanned in %.2f ms, %zu of %zu blocks in use, %zu wrong\n", when, t, used, blocks, wrong); };
  scan("first"); scan("again");
  CUdeviceptr full; cu(cuMemAlloc)(&full, GIB); cu(cuMemsetD8)(full, 7, GIB); { CUdeviceptr place = (CUdeviceptr)found; void *a[] = {&full, &place}; printf("a GiB in full use is scanned in %.3f ms\n", ms([&] { cu(cuLaunchKernel)(in_use, 512, 1, 1, 256, 1, 1, 0, s, a, 0); })); } cu(cuMemFree)(full);
  auto discard = [&] { std::vector<CUdeviceptr> p; std::vector<size_t> z; for (size_t b = 0; b < blocks; b++) { if (in(b)) continue; if (!p.empty() && p.back() + z.back() == w + b * BLOCK) z.back() += BLOCK; else { p.push_back(w + b * BLOCK); z.push_back(BLOCK); } } CUresult r; double f0 = free_gib(), h0 = rss_gib(); double t = ms([&] { r = cu(cuMemDiscardBatchAsync)(p.data(), z.data(), p.size(), 0, s); }); double t2 = ms([&] { for (size_t b = 0; b < blocks; b++) if (in(b)) cu(cuMemPrefetchAsync)(w + b * BLOCK, BLOCK, host, 0, s); }); printf("%zu ranges discarded %s in %.1f ms, the rest moved to the host in %.1f ms; free %+.2f GiB, rss %+.2f GiB\n", p.size(), name(r), t, t2, free_gib() - f0, rss_gib() - h0); };
  auto restore = [&] { double t = ms([&] { cu(cuMemPrefetchAsync)(w, n, dev, 0, s); }); double t2 = ms([&] { size_t from = 0; for (size_t b = 0; b <= blocks; b++) if (b == blocks || in(b)) { if (b > from) cu(cuMemsetD8Async)(w + from * BLOCK, 0, (b - from) * BLOCK, s); from = b + 1; } }); printf("brought back in %.1f ms, filled in %.1f ms\n", t, t2); };
  discard(); restore(); scan("after that");
  discard(); scan("discarded and read without being filled"); restore(); scan("then brought back and filled");
  printf("# who gets the memory (plain allocations of 1 GiB until the driver refuses)\n");
  auto take = [&](const char *when) { double f0 = free_gib(), a0 = available_gib(), h0 = rss_gib(); std::vector<CUdeviceptr> taken; CUdeviceptr y; double t = ms([&] { while (!cu(cuMemAlloc)(&y, GIB)) { taken.push_back(y); } }); double a1 = available_gib(), h1 = rss_gib(); printf("%s: free %.2f GiB, taken %zu GiB in %.0f ms; the host's available %+.2f GiB, rss %+.2f\n", when, f0, taken.size(), t, a1 - a0, h1 - h0); for (auto p : taken) cu(cuMemFree)(p); };
  discard(); take("discarded"); restore(); scan("after that");
  double out = ms([&] { cu(cuMemPrefetchAsync)(w, n, host, 0, s); }); printf("8 GiB moved to the host in %.0f ms\n", out); take("moved to the host"); restore(); scan("after that");
  puts("done");
}
