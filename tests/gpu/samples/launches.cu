// Every way to launch: cooperative, clusters, large shared memory, launch attributes, large parameters, tensor maps over memory
// from cudaMalloc, what kernels print and allocate. An interposer gates the launch and must pass on all that comes with it.
#include "check.h"
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cudaTypedefs.h>
namespace cg = cooperative_groups;
const size_t N = MiB;
__global__ void grid_sum(uint32_t *p, size_t n, uint32_t *sum) {
    auto g = cg::this_grid(); for (size_t i = g.thread_rank(); i < n; i += g.size()) p[i] = 1; g.sync(); uint32_t s = 0;
    for (size_t i = g.thread_rank(); i < n; i += g.size()) s += p[n - 1 - i]; atomicAdd(sum, s); g.sync(); if (!g.thread_rank()) *sum += 1;
}
__global__ void cluster_sum(uint32_t *out) {
    __shared__ uint32_t mine; auto c = cg::this_cluster(); if (!threadIdx.x) mine = c.block_rank() + 1; c.sync(); uint32_t sum = 0;
    if (!threadIdx.x) { for (unsigned i = 0; i < c.num_blocks(); i++) sum += *c.map_shared_rank(&mine, i); out[blockIdx.x] = sum; } c.sync();
}
__global__ void use_shared(uint32_t *out, int words) {
    extern __shared__ uint32_t s[]; for (int i = threadIdx.x; i < words; i += blockDim.x) s[i] = i; __syncthreads(); uint32_t sum = 0;
    for (int i = threadIdx.x; i < words; i += blockDim.x) sum += s[words - 1 - i]; atomicAdd(out, sum);
}
__global__ void copy_by_block(const uint32_t *p, uint32_t *q) {
    __shared__ uint32_t s[256]; auto b = cg::this_thread_block(); cg::memcpy_async(b, s, p + blockIdx.x * 256, sizeof s); cg::wait(b);
    q[blockIdx.x * 256 + threadIdx.x] = s[255 - threadIdx.x];
}
struct Large { uint32_t v[8000]; };
__global__ void large_parameter(const __grid_constant__ Large l, uint32_t *sum) { for (int i = threadIdx.x; i < 8000; i += blockDim.x) atomicAdd(sum, l.v[i]); }
__global__ void first_half(uint32_t *p) { p[blockIdx.x * 256 + threadIdx.x] = 5; cudaTriggerProgrammaticLaunchCompletion(); }
__global__ void second_half(uint32_t *p) { cudaGridDependencySynchronize(); p[blockIdx.x * 256 + threadIdx.x] += 2; }
__global__ void speak() { printf("block %d thread %d\n", blockIdx.x, threadIdx.x); }
__global__ void heap(int *bad) {
    auto p = (int *)malloc(4096); auto q = new int[100]; if (!p || !q) { atomicAdd(bad, 1); return; } for (int i = 0; i < 100; i++) q[i] = p[i] = threadIdx.x;
    for (int i = 0; i < 100; i++) if (q[i] + p[i] != 2 * int(threadIdx.x)) atomicAdd(bad, 1); free(p); delete[] q;
}
__device__ __noinline__ int deep(int n) { volatile int a[64]; a[n % 64] = n; return n ? deep(n - 1) + a[n % 64] : 0; }
__global__ void recurse(int *out, int n) { *out = deep(n); }
__device__ int twice(int x) { return 2 * x; } __device__ int (*pointer)(int) = twice;
__global__ void call(int (*f)(int), int *out) { *out = f(21); }
__global__ void tensor_tile(const __grid_constant__ CUtensorMap map, uint32_t *out) {
    __shared__ alignas(128) uint32_t tile[8][32]; __shared__ alignas(8) uint64_t barrier;
    uint32_t b = __cvta_generic_to_shared(&barrier), t = __cvta_generic_to_shared(tile);
    if (!threadIdx.x) { asm volatile("mbarrier.init.shared.b64 [%0], 1;\n fence.proxy.async.shared::cta;" ::"r"(b));
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 1024;" ::"r"(b) : "memory");
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(t), "l"(&map), "r"(32), "r"(8), "r"(b) : "memory");
    }
    __syncthreads(); asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra W; }" ::"r"(b) : "memory");
    out[threadIdx.x] = tile[threadIdx.x / 32][threadIdx.x % 32];
}
struct Words { __host__ __device__ int operator()(int n) const { return n * 4; } };
static uint32_t *zeros(size_t n = N) { auto p = device(n); CHECK(cudaMemset(p, 0, n * 4)); return p; }
template <class T> static T at(const T *p) { T v; CHECK(cudaMemcpy(&v, p, sizeof v, cudaMemcpyDeviceToHost)); return v; }

CASE(cooperative) {
    int can, sms, per; CHECK(cudaDeviceGetAttribute(&can, cudaDevAttrCooperativeLaunch, 0)); if (!can) skip("no cooperative launch");
    CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0)); CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per, grid_sum, 256, 0));
    printf("%d per multiprocessor\n", per); auto p = zeros(), s = zeros(1); size_t n = N; void *a[] = {&p, &n, &s};
    for (int i = 0; i < 20; i++) CHECK(cudaLaunchCooperativeKernel((void *)grid_sum, sms * per, 256, a, 0, 0)); printf("%u\n", at(s));
    SAY(cudaLaunchCooperativeKernel((void *)grid_sum, sms * per + 1, 256, a, 0, 0)); cudaGetLastError();
}
CASE(clusters) {
    auto o = zeros(64); for (unsigned c : {1u, 2u, 4u, 8u}) { cudaLaunchConfig_t k{}; k.gridDim = 64; k.blockDim = 64; cudaLaunchAttribute a[1];
    a[0].id = cudaLaunchAttributeClusterDimension; a[0].val.clusterDim = {c, 1, 1}; k.attrs = a; k.numAttrs = 1; int fit;
    CHECK(cudaOccupancyMaxActiveClusters(&fit, cluster_sum, &k)); CHECK(cudaLaunchKernelEx(&k, cluster_sum, o));
    printf("%u: %d fit %d\n", c, at(o + 63), fit > 0); k.gridDim = 63; if (c > 1) SAY(cudaLaunchKernelEx(&k, cluster_sum, o)); cudaGetLastError(); }
}
CASE(large_shared_memory) {
    auto s = zeros(1); int most; CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0)); printf("%d\n", most);
    use_shared<<<1, 256, most>>>(s, most / 4); SAY(cudaGetLastError());
    CHECK(cudaFuncSetAttribute(use_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, most)); use_shared<<<1, 256, most>>>(s, most / 4);
    CHECK(cudaGetLastError()); uint32_t w = most / 4; WANT(at(s) == w * (w - 1) / 2);
    SAY(cudaFuncSetAttribute(use_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, most + 4));
    CHECK(cudaFuncSetAttribute(use_shared, cudaFuncAttributePreferredSharedMemoryCarveout, 50));
    CHECK(cudaFuncSetCacheConfig(use_shared, cudaFuncCachePreferL1)); cudaGetLastError(); cudaFuncAttributes f; CHECK(cudaFuncGetAttributes(&f, use_shared));
    printf("%d %d\n", f.maxDynamicSharedSizeBytes, f.preferredShmemCarveout);
}
CASE(occupancy) {
    int a, b, c; size_t d; CHECK(cudaOccupancyMaxPotentialBlockSize(&a, &b, use_shared, 0, 0)); printf("%d %d\n", a, b);
    CHECK(cudaOccupancyMaxPotentialBlockSizeVariableSMem(&a, &b, use_shared, Words{})); printf("%d %d\n", a, b);
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&c, use_shared, 128, 1024, cudaOccupancyDefault)); printf("%d\n", c);
    CHECK(cudaOccupancyAvailableDynamicSMemPerBlock(&d, use_shared, 4, 128)); printf("%zu\n", d); cudaFuncAttributes f; CHECK(cudaFuncGetAttributes(&f, heap));
    printf("%d %d\n", f.maxThreadsPerBlock, f.ptxVersion);
}
CASE(asynchronous_copy) {
    auto p = device(N), q = device(N); fill<<<64, 256>>>(p, N, 1); copy_by_block<<<N / 256, 256>>>(p, q); std::vector<uint32_t> v(N);
    CHECK(cudaMemcpy(v.data(), q, N * 4, cudaMemcpyDeviceToHost)); for (size_t i = 0; i < N; i++) WANT(v[i] == value(i / 256 * 256 + 255 - i % 256, 1));
}
CASE(large_parameters) {
    static Large l; uint32_t want = 0; for (int i = 0; i < 8000; i++) want += l.v[i] = value(i, 1); auto s = zeros(1); large_parameter<<<1, 256>>>(l, s);
    CHECK(cudaGetLastError()); WANT(at(s) == want); size_t o, n; CHECK(cudaFuncGetParamInfo((void *)large_parameter, 1, &o, &n)); printf("%zu %zu\n", o, n);
}
CASE(persisting_window) {  // part of the second-level cache kept for memory from cudaMalloc
    cudaDeviceProp d; CHECK(cudaGetDeviceProperties(&d, 0)); printf("%d %d\n", d.persistingL2CacheMaxSize, d.accessPolicyMaxWindowSize);
    SAY(cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, 8 * MiB)); auto p = zeros(); cudaStream_t s; CHECK(cudaStreamCreate(&s)); cudaStreamAttrValue v{};
    v.accessPolicyWindow = {p, N * 4, 1.0f, cudaAccessPropertyPersisting, cudaAccessPropertyStreaming};
    SAY(cudaStreamSetAttribute(s, cudaLaunchAttributeAccessPolicyWindow, &v)); for (int i = 0; i < 10; i++) add<<<64, 256, 0, s>>>(p, N, 1u);
    cudaLaunchConfig_t k{}; k.gridDim = 64; k.blockDim = 256; k.stream = s; cudaLaunchAttribute a[1]; a[0].id = cudaLaunchAttributeAccessPolicyWindow;
    a[0].val = v; k.attrs = a; k.numAttrs = 1; SAY(cudaLaunchKernelEx(&k, add<uint32_t>, p, N, 1u)); CHECK(cudaStreamSynchronize(s)); printf("%u\n", at(p));
    SAY(cudaCtxResetPersistingL2Cache());
}
CASE(dependent_launch) {
    auto p = zeros(); cudaStream_t s; CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking)); CHECK(cudaDeviceSynchronize()); cudaLaunchConfig_t k{};
    k.gridDim = N / 256; k.blockDim = 256; k.stream = s; cudaLaunchAttribute a[1]; a[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    a[0].val.programmaticStreamSerializationAllowed = 1; k.attrs = a; k.numAttrs = 1; for (int i = 0; i < 50; i++) { first_half<<<N / 256, 256, 0, s>>>(p);
    CHECK(cudaLaunchKernelEx(&k, second_half, p)); } CHECK(cudaStreamSynchronize(s)); std::vector<uint32_t> v(N);
    CHECK(cudaMemcpy(v.data(), p, N * 4, cudaMemcpyDeviceToHost)); for (auto x : v) WANT(x == 7);
}
CASE(other_attributes) {
    auto p = zeros(); cudaStream_t s; CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking)); CHECK(cudaDeviceSynchronize()); cudaEvent_t e;
    CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming)); for (int which = 0; which < 5; which++) { cudaLaunchConfig_t k{}; k.gridDim = 64;
    k.blockDim = 256; k.stream = s; cudaLaunchAttribute a[1]{}; k.attrs = a; k.numAttrs = 1; switch (which) { case 0: a->id = cudaLaunchAttributePriority;
    a->val.priority = -1; break; case 1: a->id = cudaLaunchAttributeMemSyncDomain; a->val.memSyncDomain = cudaLaunchMemSyncDomainRemote; break;
    case 2: a->id = cudaLaunchAttributeLaunchCompletionEvent; a->val.launchCompletionEvent = {e, 0}; break; case 3: a->id = cudaLaunchAttributeCooperative;
    a->val.cooperative = 1; break; case 4: a->id = cudaLaunchAttributeProgrammaticEvent; a->val.programmaticEvent = {e, 0, 0}; break; } printf("%d: ", which);
    SAY(cudaLaunchKernelEx(&k, add<uint32_t>, p, N, 1u)); cudaGetLastError(); } CHECK(cudaStreamSynchronize(s));
    printf("%u %s\n", at(p), said(cudaEventQuery(e)));
}
CASE(prints) {
    size_t n; CHECK(cudaDeviceGetLimit(&n, cudaLimitPrintfFifoSize)); printf("%zu\n", n); CHECK(cudaDeviceSetLimit(cudaLimitPrintfFifoSize, 4 * MiB));
    CHECK(cudaDeviceGetLimit(&n, cudaLimitPrintfFifoSize)); printf("%zu\n", n); for (int i = 0; i < 3; i++) { speak<<<1, 4>>>(); CHECK(cudaDeviceSynchronize());
    }
}
CASE(heap) {
    size_t n; CHECK(cudaDeviceSetLimit(cudaLimitMallocHeapSize, 64 * MiB)); CHECK(cudaDeviceGetLimit(&n, cudaLimitMallocHeapSize)); printf("%zu\n", n);
    auto bad = (int *)zeros(1); for (int i = 0; i < 5; i++) heap<<<16, 256>>>(bad); printf("%d\n", at(bad));
    SAY(cudaDeviceSetLimit(cudaLimitMallocHeapSize, 128 * MiB)); cudaGetLastError();
}
CASE(stack) {
    size_t n; CHECK(cudaDeviceSetLimit(cudaLimitStackSize, 64 * KiB)); CHECK(cudaDeviceGetLimit(&n, cudaLimitStackSize)); printf("%zu\n", n);
    auto o = (int *)zeros(1); recurse<<<1, 1>>>(o, 150); CHECK(cudaDeviceSynchronize()); printf("%d\n", at(o));
    SAY(cudaDeviceSetLimit(cudaLimitStackSize, size_t(1) << 40)); cudaGetLastError();
}
CASE(function_pointer) {
    int (*f)(int); CHECK(cudaMemcpyFromSymbol(&f, pointer, sizeof f)); auto o = (int *)zeros(1); call<<<1, 1>>>(f, o); printf("%d\n", at(o));
}
CASE(tensor_map) {  // the copy engine of Hopper reads memory from cudaMalloc by a descriptor
    PFN_cuTensorMapEncodeTiled_v12000 encode; cudaDriverEntryPointQueryResult q;
    CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void **)&encode, 12000, 0, &q));
    for (size_t side : {64, 1024}) { auto p = device(side * side); fill<<<64, 256>>>(p, side * side, 1); CUtensorMap m;
    cuuint64_t dims[] = {side, side}, strides[] = {side * 4}; cuuint32_t box[] = {32, 8}, steps[] = {1, 1};
    CHECK(encode(&m, CU_TENSOR_MAP_DATA_TYPE_UINT32, 2, p, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    auto o = zeros(256); tensor_tile<<<1, 256>>>(m, o); CHECK(cudaDeviceSynchronize()); std::vector<uint32_t> v(256);
    CHECK(cudaMemcpy(v.data(), o, 1024, cudaMemcpyDeviceToHost)); for (size_t i = 0; i < 256; i++) WANT(v[i] == value((8 + i / 32) * side + 32 + i % 32, 1)); }
}
CASE(bad_configurations) {
    auto p = zeros(); uint32_t one = 1; size_t n = N; void *a[] = {&p, &n, &one}; SAY(cudaLaunchKernel((void *)add<uint32_t>, 0, 256, a, 0, 0));
    SAY(cudaLaunchKernel((void *)add<uint32_t>, 1, 2048, a, 0, 0)); SAY(cudaLaunchKernel((void *)add<uint32_t>, dim3(1, 1 << 20), 1, a, 0, 0));
    SAY(cudaLaunchKernel((void *)add<uint32_t>, 1, 1, a, 1 << 20, 0)); SAY(cudaLaunchKernel(nullptr, 1, 1, a, 0, 0));
    SAY(cudaLaunchKernel((void *)&n, 1, 1, a, 0, 0)); SAY(cudaGetLastError()); SAY(cudaLaunchKernel((void *)add<uint32_t>, 64, 256, a, 0, 0));
    printf("%u\n", at(p));
}
CASE(two_hundred_thousand) {
    auto p = zeros(256); for (int i = 0; i < 200000; i++) add<<<1, 256>>>(p, 256, 1u); CHECK(cudaGetLastError()); printf("%u\n", at(p + 255));
}
