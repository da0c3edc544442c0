// How block size and batching change the four moves of managed memory: populate (never touched -> card), evict, restore, free;
// and what the small calls that a gate or a drain adds cost. At most 8 GiB of managed memory is alive at a time.
//   nvcc -std=c++17 -O2 -arch=sm_90 blocks_probe.cu -lcuda -o blocks_probe
#include <cuda.h>
#include <cuda_runtime.h>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>
using namespace std;
#define D(x) do { CUresult r_ = (x); if (r_) { const char *s = "?"; cuGetErrorName(r_, &s); printf("FAIL line %d %s -> %d %s\n", __LINE__, #x, r_, s); exit(1); } } while (0)
static double now() { return chrono::duration<double>(chrono::steady_clock::now().time_since_epoch()).count(); }
static const size_t MB = 1 << 20, GB = 1ull << 30;
static CUmemLocation gpu, host;
__global__ void rw(uint4 *p, size_t n) { size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x, s = (size_t)gridDim.x * blockDim.x; for (; i < n; i += s) { uint4 v = p[i]; v.x += 1; p[i] = v; } }
__global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n); }
static long rss() { FILE *f = fopen("/proc/self/status", "r"); char l[256]; long v = 0; while (fgets(l, 256, f)) if (!strncmp(l, "VmRSS:", 6)) v = atol(l + 6); fclose(f); return v; }
static long avail() { FILE *f = fopen("/proc/meminfo", "r"); char l[256]; long v = 0; while (fgets(l, 256, f)) if (!strncmp(l, "MemAvailable:", 13)) v = atol(l + 13); fclose(f); return v; }
typedef vector<CUdeviceptr> V;
static double touch(V &v, size_t b) { double t = now(); for (auto p : v) rw<<<1024, 256>>>((uint4 *)p, b / 16); cudaDeviceSynchronize(); return now() - t; }
static double move(V &v, size_t b, CUmemLocation l, int k) {
  double t = now(); vector<thread> th;
  for (int i = 0; i < k; i++) th.emplace_back([&, i] { cudaSetDevice(0); CUstream s; D(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING)); for (size_t j = i; j < v.size(); j += k) D(cuMemPrefetchAsync(v[j], b, l, 0, s)); D(cuStreamSynchronize(s)); cuStreamDestroy(s); });
  for (auto &x : th) x.join();
  return now() - t;
}
static double batch(V &v, size_t b, size_t per, int k) {
  double t = now(); vector<thread> th; vector<size_t> sz(per, b);
  for (int i = 0; i < k; i++) th.emplace_back([&, i] { cudaSetDevice(0); CUstream s; D(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING)); size_t ix[1] = {0};
    for (size_t j = i * per; j < v.size(); j += per * k) { size_t n = min(per, v.size() - j); CUmemLocation l[1] = {gpu}; D(cuMemPrefetchBatchAsync(&v[j], sz.data(), n, l, ix, 1, 0, s)); }
    D(cuStreamSynchronize(s)); cuStreamDestroy(s); });
  for (auto &x : th) x.join();
  return now() - t;
}
template <class F> static void cost(const char *n, F f) { for (int i = 0; i < 200; i++) f(); double t = now(); for (int i = 0; i < 5000; i++) f(); printf("call %-46s %8.0f ns\n", n, (now() - t) / 5000 * 1e9); }
int main() {
  setvbuf(stdout, 0, _IOLBF, 0); gpu.type = CU_MEM_LOCATION_TYPE_DEVICE; gpu.id = 0; host.type = CU_MEM_LOCATION_TYPE_HOST; host.id = 0;
  cudaSetDevice(0); cudaFree(0);
  { void *h; CUdeviceptr d; CUstream s; D(cuStreamCreate(&s, 1)); D(cuMemHostAlloc(&h, 2 * GB, 0)); D(cuMemAlloc(&d, 2 * GB)); for (int i = 0; i < 3; i++) { double t = now(); D(cuMemcpyHtoDAsync(d, h, 2 * GB, s)); D(cuStreamSynchronize(s)); double a = now() - t; t = now(); D(cuMemcpyDtoHAsync(h, d, 2 * GB, s)); D(cuStreamSynchronize(s)); printf("pinned h2d %.1f d2h %.1f GiB/s\n", 2 / a, 2 / (now() - t)); } cuMemFree(d); cuMemFreeHost(h); }
  const size_t N = 4 * GB;
  for (size_t b : {2 * MB, 20 * MB, 128 * MB, 1024 * MB, 4096 * MB}) {
    size_t n = N / b; double G = (double)n * b / GB;
    for (int rep = 0; rep < 2; rep++) {
      { V v(n); double t = now(); for (auto &p : v) D(cuMemAlloc(&p, b)); double a = now() - t, k = touch(v, b); t = now(); for (auto p : v) D(cuMemFree(p)); printf("%4zu MiB native: alloc %.4f touch %.4f free %.4f s\n", b / MB, a, k, now() - t); }
      { V v(n); double t = now(); for (auto &p : v) D(cuMemAllocManaged(&p, b, 1)); double a = now() - t, k = touch(v, b), k2 = touch(v, b); t = now(); for (auto p : v) D(cuMemFree(p)); printf("%4zu MiB managed, faults: alloc %.4f touch %.4f (%.1f GiB/s) again %.4f free %.4f s\n", b / MB, a, k, G / k, k2, now() - t); }
      { V v(n); CUstream s; D(cuStreamCreate(&s, 1)); double t = now(), pa = 0; for (auto &p : v) { D(cuMemAllocManaged(&p, b, 1)); double q = now(); D(cuMemPrefetchAsync(p, b, gpu, 0, s)); pa += now() - q; } double a = now() - t; D(cuStreamSynchronize(s)); double w = now() - t, k = touch(v, b), k2 = touch(v, b); t = now(); for (auto p : v) D(cuMemFree(p)); printf("%4zu MiB managed, populate in caller: calls %.4f of %.4f done %.4f (%.1f GiB/s) touch %.4f again %.4f free %.4f s\n", b / MB, pa, a, w, G / w, k, k2, now() - t); cuStreamDestroy(s); }
      { V v(n); double t = now(); for (auto &p : v) D(cuMemAllocManaged(&p, b, 1)); double a = now() - t; CUcontext cx; cuCtxGetCurrent(&cx); t = now(); double w = 0; thread th([&] { cuCtxSetCurrent(cx); w = move(v, b, gpu, 1); }); double k = touch(v, b); th.join(); printf("%4zu MiB managed, another thread populates meanwhile: alloc %.4f touch %.4f populate %.4f\n", b / MB, a, k, w); t = now(); for (auto p : v) D(cuMemFree(p)); }
      { V v(n); for (auto &p : v) D(cuMemAllocManaged(&p, b, 1)); D(cuMemPrefetchAsync(v[0], b, gpu, 0, 0)); double w = n > 1 ? batch(v, b, 64, 1) : 0; printf("%4zu MiB managed, populate by batches of 64: %.4f\n", b / MB, w); for (auto p : v) D(cuMemFree(p)); }
    }
    V v(n); for (auto &p : v) D(cuMemAllocManaged(&p, b, 1)); touch(v, b);
    for (int k : {1, 2, 4, 8}) { double e = move(v, b, host, k), q = move(v, b, gpu, k); printf("%4zu MiB x%d threads: evict %.3f s %.1f GiB/s; restore %.3f s %.1f GiB/s\n", b / MB, k, e, G / e, q, G / q); if (b > 128 * MB && k == 2) break; }
    if (n > 1) for (size_t per : {8, 32, 128, 512, 2048}) for (int k : {1, 2}) { if (per > n) continue; move(v, b, host, 1); double q = batch(v, b, per, k); double t = touch(v, b); printf("%4zu MiB restore by batches of %zu, %d threads: %.3f s %.1f GiB/s; pass after %.4f\n", b / MB, per, k, q, G / q, t); }
    for (auto p : v) D(cuMemFree(p));
  }
  { V v(1); long a0 = avail(), r0 = rss(); D(cuMemAllocManaged(&v[0], N, 1)); double e = move(v, N, host, 1); printf("4 GiB never touched, prefetched to the host: %.3f s, rss +%.2f GiB, available -%.2f GiB\n", e, (rss() - r0) / 1048576.0, (a0 - avail()) / 1048576.0); cuMemFree(v[0]);
    a0 = avail(); r0 = rss(); D(cuMemAllocManaged(&v[0], N, 1)); rw<<<1024, 256>>>((uint4 *)v[0], GB / 16); cudaDeviceSynchronize(); e = move(v, N, host, 1); printf("4 GiB, first GiB touched on the card, whole prefetched to the host: %.3f s, rss +%.2f GiB, available -%.2f GiB\n", e, (rss() - r0) / 1048576.0, (a0 - avail()) / 1048576.0);
    e = move(v, N, gpu, 1); printf("  back: %.3f s\n", e); cuMemFree(v[0]);
    a0 = avail(); r0 = rss(); D(cuMemAllocManaged(&v[0], N, 1)); e = move(v, N, gpu, 1); double o = move(v, N, host, 1); printf("4 GiB populated by prefetch (%.3f s), never touched, prefetched to the host: %.3f s, rss +%.2f GiB, available -%.2f GiB\n", e, o, (rss() - r0) / 1048576.0, (a0 - avail()) / 1048576.0); cuMemFree(v[0]); }
  { CUstream s; CUevent ev; CUcontext c; CUdevice d; D(cuStreamCreate(&s, 1)); D(cuEventCreate(&ev, CU_EVENT_DISABLE_TIMING)); CUstreamCaptureStatus st; CUstreamCaptureMode m = CU_STREAM_CAPTURE_MODE_RELAXED; CUdeviceptr p; D(cuMemAllocManaged(&p, 2 * MB, 1));
    cost("cuCtxGetCurrent", [&] { cuCtxGetCurrent(&c); }); cost("cuCtxGetDevice", [&] { cuCtxGetDevice(&d); }); cost("cuStreamGetCtx", [&] { cuStreamGetCtx(s, &c); });
    cost("cuStreamIsCapturing", [&] { cuStreamIsCapturing(s, &st); }); cost("cuThreadExchangeStreamCaptureMode", [&] { cuThreadExchangeStreamCaptureMode(&m); });
    cost("cuEventRecord", [&] { cuEventRecord(ev, s); }); cost("cuEventQuery", [&] { cuEventQuery(ev); }); cost("cuEventRecord legacy", [&] { cuEventRecord(ev, 0); }); cost("cuCtxSynchronize, idle", [&] { cuCtxSynchronize(); }); cost("cuStreamQuery", [&] { cuStreamQuery(s); });
    cost("kernel launch", [&] { spin<<<1, 1, 0, s>>>(0); }); cudaDeviceSynchronize();
    cost("kernel launch + cuEventRecord", [&] { spin<<<1, 1, 0, s>>>(0); cuEventRecord(ev, s); }); cudaDeviceSynchronize();
    thread([&] { cuCtxSetCurrent(c); cost("cuEventRecord from another thread", [&] { cuEventRecord(ev, s); }); }).join();
    cost("cuMemPrefetchAsync, resident 2 MiB", [&] { cuMemPrefetchAsync(p, 2 * MB, gpu, 0, s); }); cudaDeviceSynchronize();
    double t = now(); for (int i = 0; i < 1000; i++) { CUdeviceptr q; D(cuMemAllocManaged(&q, 2 * MB, 1)); D(cuMemFree(q)); } printf("managed alloc+free 2 MiB untouched %.1f us\n", (now() - t) * 1e3);
    t = now(); for (int i = 0; i < 1000; i++) { CUdeviceptr q; D(cuMemAllocManaged(&q, 512, 1)); D(cuMemFree(q)); } printf("managed alloc+free 512 B untouched %.1f us\n", (now() - t) * 1e3);
    V w; for (int i = 0; i < 64; i++) { CUdeviceptr q; D(cuMemAllocManaged(&q, 512, 1)); w.push_back(q); } printf("512 B managed allocations lie %lld bytes apart\n", (long long)(w[1] - w[0])); 
    // a launch while another thread's prefetch call is under way: does the launch wait for it?
    CUdeviceptr big; D(cuMemAllocManaged(&big, 4 * GB, 1)); V b{big}; touch(b, 4 * GB); atomic_bool *go = new atomic_bool(false); double tm = 0; thread th([&] { cuCtxSetCurrent(c); go->store(true); tm = move(b, 4 * GB, host, 1); go->store(false); }); while (!go->load()); double worst = 0; int nl = 0; while (go->load()) { double q = now(); spin<<<1, 1, 0, s>>>(0); D(cuStreamSynchronize(s)); worst = max(worst, now() - q); nl++; } th.join(); printf("during a 4 GiB eviction of %.3f s by another thread: %d launches+syncs, worst %.4f s\n", tm, nl, worst); }
  printf("done\n");
}
