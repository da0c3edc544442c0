// What a driver does where its documentation is silent and nvshare has to do the same. One line an answer.
// c++ -std=c++17 -O2 -I $CUDA/include -o driver_probe driver_probe.cpp -ldl
#include <cuda.h>
#include <dlfcn.h>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <vector>
#include <algorithm>
#include <cstdlib>
static void *lib;
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define cu(f) ((decltype(&f))dlsym(lib, TEXT(f)))
static const char *name(CUresult r) { const char *s = "?"; cu(cuGetErrorName)(r, &s); return s + (strncmp(s, "CUDA_", 5) ? 0 : 5); }
static double ms_since(std::chrono::steady_clock::time_point t) { return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - t).count(); }
template <class F> static double ms(F f) { auto t = std::chrono::steady_clock::now(); f(); return ms_since(t); }
static const char *SPIN = ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry spin(.param .u64 n){.reg .u64 a,b,c;.reg .pred p;ld.param.u64 c,[n];mov.u64 a,%globaltimer;L:mov.u64 b,%globaltimer;sub.u64 b,b,a;setp.lt.u64 p,b,c;@p bra L;ret;}\n";
static CUfunction spin;
static void busy(CUstream s, unsigned long long ns = 50000000) { void *a[] = {&ns}; cu(cuLaunchKernel)(spin, 1, 1, 1, 1, 1, 1, 0, s, a, 0); }
static double free_mib() { size_t f, t; cu(cuMemGetInfo)(&f, &t); return f / 1048576.0; }
static CUmemLocation at(CUmemLocationType type) { CUmemLocation l; memset(&l, 0, sizeof l); l.type = type; return l; }

int main() {
  setvbuf(stdout, 0, _IOLBF, 0);
  lib = dlopen("libcuda.so.1", RTLD_NOW);
  cu(cuInit)(0);
  CUcontext c, d;
  unsigned flags; int active;
  printf("# contexts\n");
  cu(cuDevicePrimaryCtxRetain)(&c, 0); cu(cuDevicePrimaryCtxRetain)(&c, 0); cu(cuCtxSetCurrent)(c);
  CUdeviceptr p;
  cu(cuMemAlloc)(&p, 1 << 20);
  printf("primary context retained twice: reset %s;", name(cu(cuDevicePrimaryCtxReset)(0)));
  cu(cuDevicePrimaryCtxGetState)(0, &flags, &active); printf(" active %d;", active);
  printf(" alloc in it %s;", name(cu(cuMemAlloc)(&p, 1 << 20)));
  printf(" release %s,", name(cu(cuDevicePrimaryCtxRelease)(0))); printf(" %s;", name(cu(cuDevicePrimaryCtxRelease)(0)));
  cu(cuDevicePrimaryCtxRetain)(&d, 0); printf(" retain again the same handle %d\n", c == d); c = d; cu(cuCtxSetCurrent)(c);
  double f0 = free_mib(); CUcontext other; cu(cuCtxCreate)(&other, 0, 0, 0); double f1 = free_mib();
  printf("a second context takes %.1f MiB; ", f0 - f1); cu(cuCtxDestroy)(other); cu(cuCtxSetCurrent)(c); printf("after its end %.1f\n", f0 - free_mib());
  f0 = free_mib(); CUmodule m; CUresult r = cu(cuModuleLoadData)(&m, SPIN); f1 = free_mib(); printf("a small module %s takes %.1f MiB", name(r), f0 - f1);
  cu(cuModuleGetFunction)(&spin, m, "spin"); busy(0, 1000); cu(cuCtxSynchronize)(); printf(", after its first launch %.1f\n", f0 - free_mib());
  CUstream s, t; cu(cuStreamCreate)(&s, CU_STREAM_NON_BLOCKING); cu(cuStreamCreate)(&t, CU_STREAM_DEFAULT);
  f0 = free_mib(); std::vector<CUstream> many(64); for (auto &x : many) cu(cuStreamCreate)(&x, 0); printf("64 streams take %.1f MiB\n", f0 - free_mib()); for (auto x : many) cu(cuStreamDestroy)(x);

  printf("# what waits for 50 ms of work queued on the default stream (ms until the call returns)\n");
  CUdeviceptr dev[2], man[2]; size_t n = 64 << 20;
  for (int i = 0; i < 2; i++) { cu(cuMemAlloc)(&dev[i], n); cu(cuMemAllocManaged)(&man[i], n, CU_MEM_ATTACH_GLOBAL); cu(cuMemsetD8)(man[i], 1, n); }
  cu(cuCtxSynchronize)();
  std::vector<char> pageable(n, 1); void *pinned; cu(cuMemHostAlloc)(&pinned, n, 0); memset(pinned, 1, n);
  struct { const char *what; CUdeviceptr *x; } kinds[] = {{"device", dev}, {"managed", man}};
  for (auto &k : kinds) {
    auto x = k.x;
    auto timed = [&](const char *what, auto f) { cu(cuCtxSynchronize)(); busy(0); CUresult r; double w = ms([&] { r = f(); }); printf("  %s %s: %.2f %s\n", k.what, what, w, name(r)); };
    timed("cuMemsetD8", [&] { return cu(cuMemsetD8)(x[0], 2, n); });
    timed("cuMemsetD32", [&] { return cu(cuMemsetD32)(x[0], 2, n / 4); });
    timed("cuMemsetD2D8", [&] { return cu(cuMemsetD2D8)(x[0], 1024, 2, 512, 1024); });
    timed("cuMemcpyDtoD", [&] { return cu(cuMemcpyDtoD)(x[0], x[1], n); });
    timed("cuMemcpy DtoD", [&] { return cu(cuMemcpy)(x[0], x[1], n); });
    timed("cuMemcpyHtoD 4 KiB pageable", [&] { return cu(cuMemcpyHtoD)(x[0], pageable.data(), 4096); });
    timed("cuMemcpyHtoD pageable", [&] { return cu(cuMemcpyHtoD)(x[0], pageable.data(), n); });
    timed("cuMemcpyHtoDAsync pageable, same stream", [&] { return cu(cuMemcpyHtoDAsync)(x[0], pageable.data(), n, 0); });
    timed("cuMemcpyHtoDAsync 4 KiB pageable, same stream", [&] { return cu(cuMemcpyHtoDAsync)(x[0], pageable.data(), 4096, 0); });
    timed("cuMemcpyHtoDAsync pinned, same stream", [&] { return cu(cuMemcpyHtoDAsync)(x[0], pinned, n, 0); });
    timed("cuMemcpyDtoHAsync pageable 4 KiB, same stream", [&] { return cu(cuMemcpyDtoHAsync)(pageable.data(), x[0], 4096, 0); });
    timed("cuMemcpyDtoDAsync, same stream", [&] { return cu(cuMemcpyDtoDAsync)(x[0], x[1], n, 0); });
    timed("cuMemcpyHtoDAsync pageable, another stream", [&] { return cu(cuMemcpyHtoDAsync)(x[0], pageable.data(), n, s); });
    timed("cuMemFree of 1 MiB", [&] { CUdeviceptr y; if (x == dev) cu(cuMemAlloc)(&y, 1 << 20); else cu(cuMemAllocManaged)(&y, 1 << 20, CU_MEM_ATTACH_GLOBAL); return cu(cuMemFree)(y); });
    timed("cuMemFree of 64 MiB", [&] { CUdeviceptr y; if (x == dev) cu(cuMemAlloc)(&y, n); else cu(cuMemAllocManaged)(&y, n, CU_MEM_ATTACH_GLOBAL); return cu(cuMemFree)(y); });
    timed("allocation of 64 MiB", [&] { CUdeviceptr y; CUresult r = x == dev ? cu(cuMemAlloc)(&y, n) : cu(cuMemAllocManaged)(&y, n, CU_MEM_ATTACH_GLOBAL); return r; });
  }
  cu(cuCtxSynchronize)();

  printf("# stream ordered\n");
  CUdeviceptr y; CUmemoryPool pool; cu(cuDeviceGetDefaultMemPool)(&pool, 0);
  cu(cuMemAlloc)(&y, 4 << 20); printf("cuMemFreeAsync of cuMemAlloc %s\n", name(cu(cuMemFreeAsync)(y, s))); cu(cuStreamSynchronize)(s);
  cu(cuMemAllocManaged)(&y, 4 << 20, CU_MEM_ATTACH_GLOBAL); r = cu(cuMemFreeAsync)(y, s); cu(cuStreamSynchronize)(s); printf("cuMemFreeAsync of managed %s; then cuMemFree %s\n", name(r), name(cu(cuMemFree)(y)));
  auto used = [&](const char *when) { unsigned long long u, v; cu(cuMemPoolGetAttribute)(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &u); cu(cuMemPoolGetAttribute)(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &v); printf("  pool %s: used %llu MiB reserved %llu MiB\n", when, u >> 20, v >> 20); };
  cu(cuMemAllocAsync)(&y, 64 << 20, s); used("with 64 MiB"); busy(s); cu(cuMemFreeAsync)(y, s); used("freed behind 50 ms of work"); cu(cuStreamSynchronize)(s); used("after that stream's synchronisation"); cu(cuCtxSynchronize)(); used("after the context's"); cu(cuMemPoolTrimTo)(pool, 0); used("trimmed");
  cu(cuMemAllocAsync)(&y, 64 << 20, s); cu(cuStreamSynchronize)(s); r = cu(cuMemFree)(y); printf("cuMemFree of an ordered allocation %s;", name(r)); used("then");
  CUgraph graph; CUgraphExec exec; cu(cuGraphCreate)(&graph, 0); CUgraphNode node; CUDA_MEM_ALLOC_NODE_PARAMS a; memset(&a, 0, sizeof a); a.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED; a.poolProps.location = at(CU_MEM_LOCATION_TYPE_DEVICE); a.bytesize = 64 << 20;
  r = cu(cuGraphAddMemAllocNode)(&node, graph, 0, 0, &a); auto graph_memory = [&](const char *when) { unsigned long long u = 0, v = 0; cu(cuDeviceGetGraphMemAttribute)(0, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, &u); cu(cuDeviceGetGraphMemAttribute)(0, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &v); printf("  graph memory %s: used %llu MiB reserved %llu MiB free %+.0f\n", when, u >> 20, v >> 20, free_mib() - f0); };
  f0 = free_mib(); CUgraphNode fr; cu(cuGraphAddMemFreeNode)(&fr, graph, &node, 1, a.dptr); cu(cuGraphInstantiate)(&exec, graph, 0); graph_memory("instantiated"); cu(cuGraphLaunch)(exec, s); graph_memory("launched"); cu(cuStreamSynchronize)(s); graph_memory("done"); cu(cuGraphExecDestroy)(exec); cu(cuGraphDestroy)(graph); graph_memory("destroyed"); cu(cuDeviceGraphMemTrim)(0); graph_memory("trimmed");

  printf("# managed pools\n");
  for (auto l : {CU_MEM_LOCATION_TYPE_NONE, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_LOCATION_TYPE_HOST}) {
    CUmemPoolProps props; memset(&props, 0, sizeof props); props.allocType = CU_MEM_ALLOCATION_TYPE_MANAGED; props.location = at(l); CUmemoryPool mp; r = cu(cuMemPoolCreate)(&mp, &props); printf("managed pool at %d: %s", l, name(r)); if (r) { puts(""); continue; }
    r = cu(cuMemAllocFromPoolAsync)(&y, 64 << 20, mp, s); printf("; allocation %s", name(r)); if (r) { puts(""); continue; }
    int managed = 0; cu(cuPointerGetAttribute)(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, y); cu(cuMemsetD8Async)(y, 1, 64 << 20, s);
    printf("; is managed %d", managed); printf("; to the host %s", name(cu(cuMemPrefetchAsync)(y, 64 << 20, at(CU_MEM_LOCATION_TYPE_HOST), 0, s)));
    CUmemLocation dev0 = at(CU_MEM_LOCATION_TYPE_DEVICE); printf("; to the device %s", name(cu(cuMemPrefetchAsync)(y, 64 << 20, dev0, 0, s))); printf("; sync %s", name(cu(cuStreamSynchronize)(s)));
    int where = -5; cu(cuMemRangeGetAttribute)(&where, 4, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, y, 64 << 20); printf("; last prefetch %d; CPU reads %d", where, *(char *)y);
    CUdeviceptr base; size_t size; cu(cuMemGetAddressRange)(&base, &size, y); printf("; range %zu MiB", size >> 20); printf("; free %s\n", name(cu(cuMemFreeAsync)(y, s))); cu(cuStreamSynchronize)(s); cu(cuMemPoolDestroy)(mp);
  }
  CUmemoryPool current; CUmemLocation here = at(CU_MEM_LOCATION_TYPE_DEVICE); r = cu(cuMemGetMemPool)(&current, &here, CU_MEM_ALLOCATION_TYPE_MANAGED); printf("cuMemGetMemPool for managed %s\n", name(r));

  printf("# addresses\n");
  for (size_t bytes : {1, 256, 513, 4096, 65536, 1 << 20, (2 << 20) + 1}) { CUdeviceptr x[2], z[2]; size_t align_m = ~0ul, align_d = ~0ul; for (int i = 0; i < 2; i++) { cu(cuMemAllocManaged)(&x[i], bytes, CU_MEM_ATTACH_GLOBAL); cu(cuMemAlloc)(&z[i], bytes); align_m = std::min<size_t>(align_m, x[i] & -x[i]); align_d = std::min<size_t>(align_d, z[i] & -z[i]); } printf("  %zu bytes: managed aligned to %zu, apart %lld; device aligned to %zu, apart %lld\n", bytes, align_m, (long long)(x[1] - x[0]), align_d, (long long)(z[1] - z[0])); }
  for (size_t width : {1, 100, 512, 513, 5000, 65537}) { size_t one, more; CUdeviceptr x; cu(cuMemAllocPitch)(&x, &one, width, 1, 4); cu(cuMemFree)(x); cu(cuMemAllocPitch)(&x, &more, width, 100, 4); cu(cuMemFree)(x); size_t sixteen; cu(cuMemAllocPitch)(&x, &sixteen, width, 100, 16); cu(cuMemFree)(x); printf("  pitch of width %zu: height 1 %zu, height 100 %zu, elements of 16 %zu\n", width, one, more, sixteen); }
  int again = 0; for (int i = 0; i < 16; i++) { size_t bytes = (2ull << 20) << (i % 8); CUdeviceptr x, z = 0; cu(cuMemAllocManaged)(&x, bytes, CU_MEM_ATTACH_GLOBAL); cu(cuMemFree)(x); r = cu(cuMemAddressReserve)(&z, bytes, 0, x, 0); again += !r && z == x; if (!r) cu(cuMemAddressFree)(z, bytes); } printf("  a freed managed range is reserved again at its address: %d of 16\n", again);
  CUmemAllocationProp prop; memset(&prop, 0, sizeof prop); prop.type = CU_MEM_ALLOCATION_TYPE_PINNED; prop.location = at(CU_MEM_LOCATION_TYPE_DEVICE); prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR; CUmemGenericAllocationHandle h; cu(cuMemCreate)(&h, 2 << 20, &prop, 0); CUdeviceptr v; cu(cuMemAddressReserve)(&v, 2 << 20, 0, 0, 0); cu(cuMemMap)(v, 2 << 20, 0, h, 0); CUmemAccessDesc access; access.location = prop.location; access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE; cu(cuMemSetAccess)(v, 2 << 20, &access, 1); CUipcMemHandle ipc; printf("  cuIpcGetMemHandle of mapped memory %s;", name(cu(cuIpcGetMemHandle)(&ipc, v))); printf(" of managed %s;", name(cu(cuIpcGetMemHandle)(&ipc, man[0]))); printf(" of device %s\n", name(cu(cuIpcGetMemHandle)(&ipc, dev[0])));
  printf("  cuStreamWriteValue32 to device %s,", name(cu(cuStreamWriteValue32)(s, dev[0], 1, 0))); printf(" to managed %s,", name(cu(cuStreamWriteValue32)(s, man[0], 1, 0))); printf(" to mapped %s\n", name(cu(cuStreamWriteValue32)(s, v, 1, 0)));
  unsigned sync = 1; printf("  SYNC_MEMOPS on device %s,", name(cu(cuPointerSetAttribute)(&sync, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, dev[0]))); printf(" on managed %s\n", name(cu(cuPointerSetAttribute)(&sync, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, man[0])));
  int fd = -1; printf("  dma-buf of device %s,", name(cu(cuMemGetHandleForAddressRange)(&fd, dev[0], 2 << 20, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0))); printf(" of managed %s\n", name(cu(cuMemGetHandleForAddressRange)(&fd, man[0], 2 << 20, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0)));
  printf("# a process's memory as NVML tells it (nvidia-smi --query-compute-apps=used_memory)\n"); fflush(stdout);
  auto smi = [](const char *when) { printf("  %s: ", when); fflush(stdout); if (system("nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader | tr '\\n' ';'; nvidia-smi --query-gpu=memory.used,memory.reserved --format=csv,noheader")) puts("?"); };
  smi("now"); cu(cuMemAlloc)(&y, 1 << 30); smi("and 1 GiB plain"); CUdeviceptr w; cu(cuMemAllocManaged)(&w, 2ull << 30, CU_MEM_ATTACH_GLOBAL); cu(cuMemsetD8)(w, 1, 2ull << 30); cu(cuCtxSynchronize)(); smi("and 2 GiB managed"); cu(cuMemPrefetchAsync)(w, 2ull << 30, at(CU_MEM_LOCATION_TYPE_HOST), 0, 0); cu(cuCtxSynchronize)(); smi("the managed on the host"); cu(cuMemFree)(w); cu(cuMemFree)(y); smi("freed");
  puts("done");
}
