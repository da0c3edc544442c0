// What goes wrong, and with which code: asserts, illegal addresses, traps, wrong arguments, and what still works after. An
// interposer's own calls must neither swallow such an error, nor turn it into another, nor hang on it.
#include "check.h"
#undef NDEBUG
#include <cassert>
const size_t N = MiB;
__global__ void asserts(int limit) { assert(int(threadIdx.x) < limit); }
__global__ void writes(uint32_t *p) { *p = 1; }
__global__ void misaligned(char *p) { *(uint32_t *)(p + 1) = 1; }
__global__ void traps() { __trap(); }
__global__ void past_shared(int i) { extern __shared__ int s[]; s[i] = 1; }
__global__ __launch_bounds__(64) void small_block(uint32_t *p) { p[threadIdx.x] = 1; }
static void after() {  // a sticky error stays, whatever is called
    void *p; size_t a, b; uint32_t x; cudaPointerAttributes at; SAY(cudaDeviceSynchronize()); SAY(cudaGetLastError()); SAY(cudaMalloc(&p, MiB));
    SAY(cudaMalloc(&p, 100)); SAY(cudaMemGetInfo(&a, &b)); SAY(cudaMemset((void *)4096, 0, 4)); SAY(cudaMemcpy(&x, &a, 4, cudaMemcpyHostToHost));
    SAY(cudaFree(nullptr)); SAY(cudaStreamQuery(0)); SAY(cudaPointerGetAttributes(&at, &x)); writes<<<1, 1>>>(nullptr); SAY(cudaGetLastError()); cudaStream_t s;
    SAY(cudaStreamCreate(&s)); SAY(cudaMallocHost(&p, 4096)); SAY(cudaMallocManaged((void **)&p, 4096)); int n; SAY(cudaGetDeviceCount(&n));
    SAY(cudaPeekAtLastError());
}
static void again() {
    SAY(cudaDeviceReset()); auto p = device(N); fill<<<64, 256>>>(p, N, 1); SAY(cudaDeviceSynchronize()); WANT(!wrong_on_device(p, N, 1)); CHECK(cudaFree(p));
}

CASE(device_assert) { asserts<<<1, 32>>>(32); SAY(cudaDeviceSynchronize()); asserts<<<1, 64>>>(60); SAY(cudaDeviceSynchronize()); after(); }
CASE(illegal_address) { writes<<<1, 1>>>((uint32_t *)0x10000000000); SAY(cudaDeviceSynchronize()); after(); }
CASE(null_pointer) { writes<<<1, 1>>>(nullptr); SAY(cudaDeviceSynchronize()); after(); }
CASE(host_pointer) {
    int can; CHECK(cudaDeviceGetAttribute(&can, cudaDevAttrPageableMemoryAccess, 0)); if (can) skip("the card reaches pageable memory"); static uint32_t x;
    writes<<<1, 1>>>(&x); SAY(cudaDeviceSynchronize()); after();
}
CASE(after_free) {
    auto p = device(16 * N); fill<<<64, 256>>>(p, 16 * N, 1); CHECK(cudaDeviceSynchronize()); CHECK(cudaFree(p)); fill<<<64, 256>>>(p, 16 * N, 2);
    SAY(cudaDeviceSynchronize()); SAY(cudaGetLastError());
}
CASE(past_the_end) { auto p = device(N); writes<<<1, 1>>>(p + 64 * N); SAY(cudaDeviceSynchronize()); }
CASE(misaligned_address) { auto p = device<char>(N); misaligned<<<1, 1>>>(p); SAY(cudaDeviceSynchronize()); after(); }
CASE(trap) { traps<<<1, 1>>>(); SAY(cudaDeviceSynchronize()); after(); }
CASE(error_seen_by_event) {
    cudaEvent_t e; CHECK(cudaEventCreate(&e)); traps<<<1, 1>>>(); SAY(cudaEventRecord(e)); SAY(cudaEventSynchronize(e)); SAY(cudaEventQuery(e));
    SAY(cudaStreamSynchronize(0));
}
CASE(error_seen_by_copy) {
    auto p = device(N); uint32_t x; traps<<<1, 1>>>(); SAY(cudaMemcpy(&x, p, 4, cudaMemcpyDeviceToHost)); SAY(cudaFree(p)); SAY(cudaGetLastError());
}
CASE(error_of_own_context) {  // a context that failed is destroyed; another works on
    CHECK(cuInit(0)); CUcontext a, b; CHECK(cuCtxCreate(&a, nullptr, 0, 0)); auto p = device(N); traps<<<1, 1>>>(); SAY(cuCtxSynchronize()); CUdeviceptr q;
    SAY(cuMemAlloc(&q, 4)); SAY(cuMemFree(CUdeviceptr(p))); SAY(cuCtxDestroy(a)); SAY(cuCtxCreate(&b, nullptr, 0, 0)); SAY(cuMemAlloc(&q, MiB));
    SAY(cuMemsetD8(q, 1, MiB)); SAY(cuCtxSynchronize());
}
CASE(reset) {
    for (int i = 0; i < 4; i++) { auto p = device(16 * N); void *h, *m; cudaStream_t s; CHECK(cudaMallocHost(&h, N)); CHECK(cudaMallocManaged(&m, N));
    CHECK(cudaStreamCreate(&s)); fill<<<64, 256, 0, s>>>(p, 16 * N, i); if (i % 2) CHECK(cudaStreamSynchronize(s)); CHECK(cudaDeviceReset()); } again();
    void *p = (void *)0x700000000000; SAY(cudaFree(p)); cudaGetLastError();
}
CASE(reset_gives_back) {  // alone on the card
    size_t a, b, t; cudaFree(0); CHECK(cudaDeviceReset()); CHECK(cudaMemGetInfo(&a, &t)); for (int i = 0; i < 3; i++) { device(64 * N);
    CHECK(cudaDeviceReset()); CHECK(cudaMemGetInfo(&b, &t)); WANT(a - b < 16 * MiB || b > a); }
}
CASE(reset_after_error) { traps<<<1, 1>>>(); SAY(cudaDeviceSynchronize()); again(); }
CASE(bad_launches) {
    auto p = device(N); small_block<<<1, 128>>>(p); SAY(cudaPeekAtLastError()); SAY(cudaGetLastError()); SAY(cudaGetLastError());
    small_block<<<1, 64, 1 << 20>>>(p); SAY(cudaGetLastError()); small_block<<<0, 64>>>(p); SAY(cudaGetLastError()); small_block<<<1, 64>>>(p);
    SAY(cudaGetLastError()); SAY(cudaDeviceSynchronize()); past_shared<<<1, 1>>>(1 << 20); SAY(cudaDeviceSynchronize());
}
CASE(wrong_arguments) {
    void *p; size_t n; cudaStream_t s = nullptr; int i; auto d = device(N); static uint32_t h[64]; SAY(cudaMalloc((void **)nullptr, 4));
    SAY(cudaMallocPitch((void **)nullptr, &n, 4, 4)); SAY(cudaMallocPitch(&p, nullptr, 4, 4)); SAY(cudaMallocHost((void **)nullptr, 4));
    SAY(cudaMallocManaged((void **)nullptr, 4)); SAY(cudaMalloc3D(nullptr, make_cudaExtent(1, 1, 1))); SAY(cudaMemGetInfo(&n, nullptr));
    SAY(cudaMemGetInfo(nullptr, &n)); SAY(cudaMemGetInfo(nullptr, nullptr)); SAY(cudaGetLastError());
    SAY(cudaMemcpy(d, nullptr, 4, cudaMemcpyHostToDevice)); SAY(cudaMemcpy(nullptr, h, 4, cudaMemcpyHostToDevice));
    SAY(cudaMemcpy(nullptr, nullptr, 0, cudaMemcpyDefault)); SAY(cudaMemcpy(d, d, 4, cudaMemcpyDeviceToDevice));
    SAY(cudaMemcpyAsync(d, h, 0, cudaMemcpyHostToDevice, 0)); SAY(cudaMemcpy2D(d, 4, h, 4, 8, 1, cudaMemcpyHostToDevice)); SAY(cudaMemset2D(d, 4, 0, 8, 2));
    SAY(cudaMemcpyToSymbol("nothing", h, 4)); SAY(cudaGetSymbolAddress(&p, (const void *)"nothing")); SAY(cudaGetLastError());
    SAY(cudaSetDevice(-1)); SAY(cudaSetDevice(99)); SAY(cudaGetDevice(nullptr)); SAY(cudaDeviceGetAttribute(&i, cudaDeviceAttr(9999), 0));
    SAY(cudaDeviceGetAttribute(&i, cudaDevAttrWarpSize, 99)); SAY(cudaDeviceGetAttribute(nullptr, cudaDevAttrWarpSize, 0)); cudaDeviceProp prop;
    SAY(cudaGetDeviceProperties(&prop, 99)); SAY(cudaStreamCreate(nullptr)); SAY(cudaStreamCreateWithFlags(&s, 99)); SAY(cudaEventCreate(nullptr));
    SAY(cudaEventRecord(nullptr)); SAY(cudaEventElapsedTime(nullptr, nullptr, nullptr)); SAY(cudaEventDestroy(nullptr));
    SAY(cudaFuncSetAttribute(writes, cudaFuncAttribute(99), 0)); SAY(cudaDeviceSetLimit(cudaLimit(99), 0)); SAY(cudaDeviceGetLimit(&n, cudaLimit(99)));
    SAY(cudaHostAlloc(&p, 4, 999)); SAY(cudaFreeHost(h)); SAY(cudaFree(h)); SAY(cudaFreeArray((cudaArray_t) nullptr)); SAY(cudaGetLastError());
}
CASE(wrong_arguments_to_driver) {
    CHECK(cudaFree(0)); CUdeviceptr p = 0; size_t n; void *h = &n; CUcontext c; CUmodule m; CUfunction f; CUstream s; CUevent e; int i;
    auto d = CUdeviceptr(device(N)); SAY(cuMemAlloc(nullptr, 4)); SAY(cuMemAlloc(&p, 0)); SAY(cuMemAllocPitch(&p, nullptr, 4, 4, 4)); SAY(cuMemFree(0));
    SAY(cuMemFree(123)); SAY(cuMemFree(d + 1)); SAY(cuMemcpyHtoD(d, nullptr, 4)); SAY(cuMemcpyDtoH(nullptr, d, 4)); SAY(cuMemcpyDtoH(h, 0, 4));
    SAY(cuMemcpyDtoD(d, 0, 4)); SAY(cuMemcpyHtoD(d, h, 0)); SAY(cuMemsetD8(0, 0, 4)); SAY(cuMemsetD32(d + 1, 0, 4)); SAY(cuMemsetD2D32(d, 3, 0, 1, 2));
    SAY(cuMemcpy2D(nullptr)); SAY(cuMemcpy3D(nullptr)); CUDA_MEMCPY2D two{}; SAY(cuMemcpy2D(&two));
    SAY(cuDeviceGet(&i, 99)); SAY(cuDeviceGet(nullptr, 0)); SAY(cuDeviceGetCount(nullptr)); SAY(cuDeviceTotalMem(nullptr, 0)); SAY(cuDeviceTotalMem(&n, 99));
    SAY(cuDeviceGetAttribute(nullptr, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 0)); SAY(cuDeviceGetAttribute(&i, CUdevice_attribute(9999), 0));
    SAY(cuCtxCreate(&c, nullptr, 0, 99)); SAY(cuCtxCreate(&c, nullptr, 0xffffffff, 0)); SAY(cuCtxCreate(nullptr, nullptr, 0, 0)); SAY(cuCtxDestroy(nullptr));
    SAY(cuCtxPushCurrent(nullptr)); SAY(cuModuleLoadData(&m, nullptr)); SAY(cuModuleGetFunction(&f, nullptr, "x")); SAY(cuModuleUnload(nullptr));
    SAY(cuLaunchKernel(nullptr, 1, 1, 1, 1, 1, 1, 0, 0, nullptr, nullptr)); SAY(cuLaunchKernelEx(nullptr, nullptr, nullptr, nullptr));
    SAY(cuStreamCreate(nullptr, 0)); SAY(cuStreamCreate(&s, 99)); SAY(cuStreamDestroy(nullptr)); SAY(cuEventCreate(&e, 99)); SAY(cuEventCreate(nullptr, 0));
    SAY(cuEventRecord(nullptr, nullptr)); SAY(cuEventDestroy(nullptr)); SAY(cuEventQuery(nullptr)); SAY(cuStreamWaitEvent(nullptr, nullptr, 0));
    SAY(cuArrayCreate(nullptr, nullptr)); SAY(cuArrayDestroy(nullptr)); SAY(cuMemHostAlloc(nullptr, 4, 0)); SAY(cuMemHostAlloc(&h, 4, 999));
    SAY(cuMemHostRegister(nullptr, 4, 0)); SAY(cuMemAllocManaged(&p, 4, 99)); SAY(cuPointerGetAttribute(nullptr, CU_POINTER_ATTRIBUTE_CONTEXT, d));
    SAY(cuPointerGetAttribute(&i, CUpointer_attribute(999), d)); SAY(cuPointerGetAttributes(0, nullptr, nullptr, d)); SAY(cuMemAllocAsync(nullptr, 4, 0));
    SAY(cuMemFreeAsync(0, 0)); SAY(cuMemPoolCreate(nullptr, nullptr)); SAY(cuMemPoolDestroy(nullptr)); SAY(cuMemCreate(nullptr, 0, nullptr, 0));
    SAY(cuMemRelease(0)); SAY(cuMemUnmap(0, 0)); SAY(cuMemMap(0, 0, 0, 0, 0)); SAY(cuIpcGetMemHandle(nullptr, d)); SAY(cuGraphLaunch(nullptr, nullptr));
    SAY(cuStreamBeginCapture(nullptr, CU_STREAM_CAPTURE_MODE_GLOBAL)); SAY(cuStreamEndCapture(nullptr, nullptr)); SAY(cuLaunchHostFunc(0, nullptr, nullptr));
    SAY(cuMemGetAddressRange(&p, &n, 0)); SAY(cuMemPrefetchAsync(0, 4, {CU_MEM_LOCATION_TYPE_DEVICE, 0}, 0, 0)); CHECK(cuCtxSynchronize());
}
