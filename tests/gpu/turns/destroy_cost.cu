// What the end of a stream, an event, a graph and a context costs the thread that ends it: destroy_cost SECONDS [GIB 1]. Each stream and event has work in flight.
// Prints for each the number, the median, the 99th percentile and the longest in us.
#include <cuda.h>
#include <cuda_runtime.h>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>
#define C(x) do { int e_ = (int)(x); if (e_) { printf("error %d at %s\n", e_, #x); exit(1); } } while (0)
__global__ void add(int *o) { atomicAdd(o, 1); }
static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
static std::vector<double> took[4];
template <class F> static void timed(int which, F f) { double b = now(); f(); took[which].push_back((now() - b) * 1e6); }
int main(int c, char **v) {
    double seconds = c > 1 ? atof(v[1]) : 5, gib = c > 2 ? atof(v[2]) : 1; void *q; int *o; C(cudaMalloc(&q, (size_t)(gib * (1 << 30)))); C(cudaMemset(q, 1, (size_t)(gib * (1 << 30)))); C(cudaMalloc(&o, 4)); add<<<1, 1>>>(o); C(cudaDeviceSynchronize());
    CUdevice d; C(cuDeviceGet(&d, 0)); CUcontext mine; C(cuCtxGetCurrent(&mine)); double begin = now();
    for (int i = 0; now() - begin < seconds; i++) {
        cudaStream_t s; cudaEvent_t e; C(cudaStreamCreateWithFlags(&s, i % 2)); C(cudaEventCreate(&e)); for (int k = 0; k < 4; k++) add<<<1, 1, 0, s>>>(o); C(cudaEventRecord(e, s));
        timed(1, [&] { C(cudaEventDestroy(e)); }); timed(0, [&] { C(cudaStreamDestroy(s)); });
        if (i % 4 == 0) { cudaGraph_t g; cudaGraphExec_t x; C(cudaStreamCreateWithFlags(&s, 1)); C(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal)); add<<<1, 1, 0, s>>>(o); C(cudaStreamEndCapture(s, &g)); C(cudaGraphInstantiate(&x, g, 0)); C(cudaGraphLaunch(x, s)); C(cudaStreamSynchronize(s)); timed(2, [&] { C(cudaGraphExecDestroy(x)); C(cudaGraphDestroy(g)); }); C(cudaStreamDestroy(s)); }
        if (i % 64 == 0) { CUcontext other; C(cuCtxCreate(&other, nullptr, 0, d)); CUdeviceptr p; C(cuMemAlloc(&p, 64 << 20)); C(cuMemsetD8(p, 1, 64 << 20)); C(cuCtxSynchronize()); timed(3, [&] { C(cuCtxDestroy(other)); }); C(cuCtxSetCurrent(mine)); }
    }
    C(cudaDeviceSynchronize()); const char *name[] = {"stream", "event", "graph", "context"}; printf("{");
    for (int i = 0; i < 4; i++) { auto &t = took[i]; std::sort(t.begin(), t.end()); printf("%s\"%s\": {\"n\": %zu, \"p50\": %.1f, \"p99\": %.1f, \"max\": %.1f}", i ? ", " : "", name[i], t.size(), t[t.size() / 2], t[t.size() * 99 / 100], t.back()); }
    printf("}\n");
}
