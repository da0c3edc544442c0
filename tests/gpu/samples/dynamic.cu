// Work that kernels start: dynamic parallelism, and graphs launched from the card. It passes no host call, so an interposer sees
// only the first launch, and must wait for all of it.
// build: -rdc=true -lcudadevrt
#include "check.h"
__global__ void child(uint32_t *p, uint32_t base) { p[base + threadIdx.x] += threadIdx.x; }
__global__ void parent(uint32_t *p) { child<<<1, 32>>>(p, threadIdx.x * 32); child<<<1, 32, 0, cudaStreamFireAndForget>>>(p, threadIdx.x * 32 + 1024); }
__global__ void last(uint32_t *p) { p[0] = 77; }
__global__ void with_tail(uint32_t *p) { child<<<1, 32>>>(p, 0); last<<<1, 1, 0, cudaStreamTailLaunch>>>(p); }
__global__ void split(uint32_t *p, int from, int to, int depth) {  // marks its range once per level
    if (depth == 0) { for (int i = from; i < to; i++) p[i]++; return; }
    int mid = (from + to) / 2; split<<<1, 1>>>(p, from, mid, depth - 1); split<<<1, 1>>>(p, mid, to, depth - 1);
}
__global__ void launch(cudaGraphExec_t g) { cudaGraphLaunch(g, cudaStreamGraphFireAndForget); }
__global__ void allocate(uint32_t **out) {
    void *p; *out = cudaMalloc(&p, 4000) == cudaSuccess ? (uint32_t *)p : nullptr; for (int i = 0; i < 1000; i++) (*out)[i] = i;
}
__global__ void sum_and_free(uint32_t **in, uint32_t *sum) { for (int i = 0; i < 1000; i++) *sum += (*in)[i]; cudaFree(*in); }
static uint32_t *zeros(size_t n) { auto p = device(n); CHECK(cudaMemset(p, 0, n * 4)); return p; }
static std::vector<uint32_t> seen(uint32_t *p, size_t n) {
    std::vector<uint32_t> v(n); CHECK(cudaMemcpy(v.data(), p, n * 4, cudaMemcpyDeviceToHost)); return v;
}

CASE(children) {
    auto p = zeros(2048); parent<<<1, 32>>>(p); CHECK(cudaGetLastError()); auto v = seen(p, 2048);
    for (int i = 0; i < 2048; i++) WANT(v[i] == uint32_t(i % 32));
}
CASE(tail) { auto p = zeros(32); with_tail<<<1, 1>>>(p); auto v = seen(p, 32); WANT(v[0] == 77 && v[31] == 31); }
CASE(recursion) {
    size_t n = 1 << 16; auto p = zeros(n); CHECK(cudaDeviceSetLimit(cudaLimitDevRuntimePendingLaunchCount, 4096)); size_t limit;
    CHECK(cudaDeviceGetLimit(&limit, cudaLimitDevRuntimePendingLaunchCount)); printf("pending %zu\n", limit); split<<<1, 1>>>(p, 0, n, 8);
    CHECK(cudaGetLastError()); auto v = seen(p, n); for (auto x : v) WANT(x == 1);
}
CASE(device_heap) {
    auto out = (uint32_t **)zeros(2); auto sum = zeros(1); allocate<<<1, 1>>>(out); sum_and_free<<<1, 1>>>(out, sum); CHECK(cudaDeviceSynchronize());
    WANT(seen(sum, 1)[0] == 499500);
}
CASE(graph_from_card) {
    size_t n = MiB; auto p = zeros(n); cudaStream_t s; CHECK(cudaStreamCreate(&s)); cudaGraph_t g, h;
    CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal)); add<<<64, 256, 0, s>>>(p, n, 5u); CHECK(cudaStreamEndCapture(s, &g));
    cudaGraphExec_t inner, outer; CHECK(cudaGraphInstantiate(&inner, g, cudaGraphInstantiateFlagDeviceLaunch)); CHECK(cudaGraphUpload(inner, s));
    CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal)); launch<<<1, 1, 0, s>>>(inner); CHECK(cudaStreamEndCapture(s, &h));
    CHECK(cudaGraphInstantiate(&outer, h, cudaGraphInstantiateFlagDeviceLaunch)); CHECK(cudaGraphUpload(outer, s));
    for (int i = 0; i < 3; i++) { CHECK(cudaGraphLaunch(outer, s)); CHECK(cudaStreamSynchronize(s)); } auto v = seen(p, n); for (auto x : v) WANT(x == 15);
}
