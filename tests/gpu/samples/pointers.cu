// What the driver says about a pointer: type, device, base, size, whether it is managed. Frameworks decide by it how to copy, so
// memory from cudaMalloc has to look as it does natively, whatever it is made of.
#include "check.h"
__device__ int variable[100];
__managed__ int managed_variable;
struct Place { const char *name; void *p; };
static std::vector<Place> places() {
    static char pageable[8192]; void *small, *large, *odd, *pinned, *mapped, *managed, *stream, *symbol, *pitched; size_t pitch;
    auto registered = aligned_alloc(4096, 8192);
    CHECK(cudaMalloc(&small, 1000)); CHECK(cudaMalloc(&large, 64 * MiB)); CHECK(cudaMalloc(&odd, 3 * MiB + 17)); CHECK(cudaMallocHost(&pinned, 8192));
    CHECK(cudaHostAlloc(&mapped, 8192, cudaHostAllocMapped)); CHECK(cudaMallocManaged(&managed, 3 * MiB)); CHECK(cudaMallocAsync(&stream, 3 * MiB, 0));
    CHECK(cudaStreamSynchronize(0));
    CHECK(cudaHostRegister(registered, 8192, 0)); CHECK(cudaGetSymbolAddress(&symbol, variable)); CHECK(cudaMallocPitch(&pitched, &pitch, 1000, 1000));
    return {{"null", nullptr}, {"pageable", pageable}, {"small", small}, {"large", large}, {"inside", (char *)large + 12345}, {"odd", odd}, {"end of odd", (char *)odd + 3 * MiB + 16}, {"pitched", pitched}, {"pinned", pinned}, {"mapped", mapped}, {"registered", registered}, {"managed", managed}, {"stream-ordered", stream}, {"symbol", symbol}, {"managed symbol", &managed_variable}};
}
CASE(runtime) {
    for (auto [name, p] : places()) { cudaPointerAttributes a{}; printf("%s: ", name); SAY(cudaPointerGetAttributes(&a, p));
    printf("  type %d device %d same device pointer %d same host pointer %d\n", a.type, a.device, a.devicePointer == p, a.hostPointer == p); }
    SAY(cudaGetLastError());
}
CASE(driver_each) {
    for (auto [n, p] : places()) for (int a : {1, 2, 3, 4, 6, 8, 9, 10, 13, 14, 15, 16, 17, 18, 19, 20, 21}) {
        uint64_t v[4] = {0, 0, 0, 0}; auto r = cuPointerGetAttribute(v, CUpointer_attribute(a), CUdeviceptr(p)); printf("%s, %d: %s", n, a, said(r));
        if (r == CUDA_SUCCESS) printf(" %d", a == 1 || a == 17 ? v[0] != 0 : a == 3 || a == 4 || a == 19 ? v[0] == uint64_t(p) : a == 20 ? -1 : int(v[0]));
        puts("");
    }
}
CASE(driver_many) {  // the calls of several attributes at once, as UCX and NCCL make them
    for (auto [n, p] : places()) { unsigned type = 0, managed = 9; int ordinal = -9; CUcontext ctx = nullptr; CUdeviceptr start = 0; size_t size = 0;
    CUpointer_attribute which[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_CONTEXT, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
    void *to[] = {&type, &managed, &ordinal, &ctx, &start, &size};
    printf("%s: %s type %u managed %u ordinal %d context %d offset %lld size %zu\n", n, said(cuPointerGetAttributes(6, which, to, CUdeviceptr(p))), type, managed, ordinal, ctx != nullptr, start ? (long long)(CUdeviceptr(p) - start) : -1, size);
    }
}
CASE(address_range) {
    for (auto [n, p] : places()) { CUdeviceptr base = 0; size_t size = 0; auto r = cuMemGetAddressRange(&base, &size, CUdeviceptr(p));
    printf("%s: %s offset %lld size %zu\n", n, said(r), base ? (long long)(CUdeviceptr(p) - base) : -1, size); } auto p = device<char>(5000);
    SAY(cuMemGetAddressRange(nullptr, nullptr, CUdeviceptr(p))); size_t size; SAY(cuMemGetAddressRange(nullptr, &size, CUdeviceptr(p))); printf("%zu\n", size);
}
CASE(after_free) {
    auto p = device<char>(8 * MiB); cudaPointerAttributes a; CHECK(cudaFree(p)); SAY(cudaPointerGetAttributes(&a, p)); printf("type %d\n", a.type); size_t n;
    CUdeviceptr b; SAY(cuMemGetAddressRange(&b, &n, CUdeviceptr(p))); SAY(cudaFree(p)); SAY(cudaGetLastError());
}
CASE(buffer_ids) {
    auto p = device<char>(MiB), q = device<char>(MiB); uint64_t a = 0, b = 0, c = 0;
    CHECK(cuPointerGetAttribute(&a, CU_POINTER_ATTRIBUTE_BUFFER_ID, CUdeviceptr(p)));
    CHECK(cuPointerGetAttribute(&b, CU_POINTER_ATTRIBUTE_BUFFER_ID, CUdeviceptr(q)));
    CHECK(cuPointerGetAttribute(&c, CU_POINTER_ATTRIBUTE_BUFFER_ID, CUdeviceptr(p + 5))); WANT(a != b && a == c); CHECK(cudaFree(p)); p = device<char>(MiB);
    CHECK(cuPointerGetAttribute(&c, CU_POINTER_ATTRIBUTE_BUFFER_ID, CUdeviceptr(p))); WANT(a != c);
}
CASE(sync_memops) {
    for (size_t n : {size_t(1000), 4 * MiB}) { auto p = device<char>(n); unsigned one = 1, seen = 9;
    SAY(cuPointerSetAttribute(&one, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, CUdeviceptr(p)));
    SAY(cuPointerGetAttribute(&seen, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, CUdeviceptr(p))); printf("%u\n", seen); CHECK(cudaMemset(p, 1, n)); }
}
CASE(dma_buf) {  // what a network card's driver asks for
    int can; CHECK(cudaFree(0)); CHECK(cuDeviceGetAttribute(&can, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, 0)); printf("dma-buf %d\n", can);
    auto p = device<char>(4 * MiB); int fd = -1; SAY(cuMemGetHandleForAddressRange(&fd, CUdeviceptr(p), 4 * MiB, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
    printf("descriptor %d\n", fd >= 0);
}
CASE(freed_wrongly) {
    auto p = device<char>(4 * MiB); void *m, *h; CHECK(cudaMallocManaged(&m, MiB)); CHECK(cudaMallocHost(&h, MiB)); SAY(cudaFree(p + 256)); SAY(cudaFree(h));
    SAY(cudaFreeHost(p)); SAY(cudaFreeHost(m)); SAY(cudaFree((void *)16)); int x; SAY(cudaFree(&x)); SAY(cudaGetLastError()); SAY(cudaFree(p));
    SAY(cudaFree(m)); SAY(cudaFreeHost(h));
}
