// What the end of a stream, an event and a graph costs the thread that ends it: destroy_cost SECONDS [GIB 1]. Each stream and event has work in flight.
// Prints for each the number, the median, the 99th percentile and the longest in us.
#include <cuda_runtime.h>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>
#define C(x) do { int e_ = (int)(x); if (e_) { printf("error %d at %s\n", e_, #x); exit(1); } } while (0)
__global__ void add(int *o) { atomicAdd(o, 1); }
static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
static std::vector<double> took[3];
template <class F> static void timed(int which, F f) { double b = now(); f(); took[which].push_back((now() - b) * 1e6); }
int main(int c, char **v) {
    double seconds = c > 1 ? atof(v[1]) : 5, gib = c > 2 ? atof(v[2]) : 1; void *q; int *o; C(cudaMalloc(&q, (size_t)(gib * (1 << 30)))); C(cudaMemset(q, 1, (size_t)(gib * (1 << 30)))); C(cudaMalloc(&o, 4)); add<<<1, 1>>>(o); C(cudaDeviceSynchronize());
    double begin = now();
    for (int i = 0; now() - begin < seconds; i++) {
        cudaStream_t s[16]; cudaEvent_t e[16];
        for (int at = 0; at < 16; at++) { C(cudaStreamCreateWithFlags(&s[at], at % 2)); C(cudaEventCreate(&e[at])); for (int k = 0; k < 4; k++) add<<<1, 1, 0, s[at]>>>(o); C(cudaEventRecord(e[at], s[at])); }
        for (int at = 0; at < 16; at++) { timed(1, [&] { C(cudaEventDestroy(e[at])); }); timed(0, [&] { C(cudaStreamDestroy(s[at])); }); }
        cudaGraph_t g; cudaGraphExec_t x; C(cudaStreamCreateWithFlags(&s[0], 1)); C(cudaStreamBeginCapture(s[0], cudaStreamCaptureModeThreadLocal)); add<<<1, 1, 0, s[0]>>>(o); C(cudaStreamEndCapture(s[0], &g));
        C(cudaGraphInstantiate(&x, g, 0)); C(cudaGraphLaunch(x, s[0])); C(cudaStreamSynchronize(s[0])); timed(2, [&] { C(cudaGraphExecDestroy(x)); C(cudaGraphDestroy(g)); }); C(cudaStreamDestroy(s[0]));
    }
    C(cudaDeviceSynchronize()); const char *name[] = {"stream", "event", "graph"}; printf("{");
    for (int i = 0; i < 3; i++) { auto &t = took[i]; std::sort(t.begin(), t.end()); printf("%s\"%s\": {\"n\": %zu, \"p50\": %.1f, \"p99\": %.1f, \"max\": %.1f}", i ? ", " : "", name[i], t.size(), t[t.size() / 2], t[t.size() * 99 / 100], t.back()); }
    printf("}\n");
}
