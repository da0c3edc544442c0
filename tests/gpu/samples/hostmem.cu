// Host memory that the card can reach: pinned, mapped, write-combined, registered. An interposer that counts or wraps host
// memory must leave flags, device pointers, alignment and errors as they are.
#include "check.h"
#include <fcntl.h>
#include <sys/mman.h>
const size_t N = MiB;
__global__ void atomics(int *p) {
    atomicAdd_system(p, 1); atomicMax_system(p + 1, int(blockIdx.x * blockDim.x + threadIdx.x)); atomicExch_system(p + 2, 7);
    atomicOr_system(p + 3, 1 << threadIdx.x % 32); atomicCAS_system(p + 4, 0, 9);
}

CASE(malloc_host) {
    uint32_t *h; CHECK(cudaMallocHost(&h, N * 4)); WANT(uintptr_t(h) % 256 == 0); fill_host(h, N, 1); auto d = device(N);
    CHECK(cudaMemcpyAsync(d, h, N * 4, cudaMemcpyHostToDevice, 0)); WANT(!wrong_on_device(d, N, 1));
    add<<<256, 256>>>(h, N, 1u); CHECK(cudaDeviceSynchronize()); for (size_t i = 0; i < N; i++) WANT(h[i] == value(i, 1) + 1); CHECK(cudaFreeHost(h));
    SAY(cudaFreeHost(nullptr)); SAY(cudaFreeHost(&d)); SAY(cudaGetLastError());
}
CASE(zero_copy) {  // as simpleZeroCopy
    CHECK(cudaSetDeviceFlags(cudaDeviceMapHost)); float *a, *c, *da, *dc; CHECK(cudaHostAlloc(&a, N * 4, cudaHostAllocMapped));
    CHECK(cudaHostAlloc(&c, N * 4, cudaHostAllocMapped | cudaHostAllocWriteCombined)); CHECK(cudaHostGetDevicePointer(&da, a, 0));
    CHECK(cudaHostGetDevicePointer(&dc, c, 0));
    printf("same address: %d %d\n", a == da, c == dc); for (size_t i = 0; i < N; i++) a[i] = i, c[i] = 1; add<<<256, 256>>>(da, N, 1.f);
    add<<<256, 256>>>(dc, N, 4.f); CHECK(cudaDeviceSynchronize()); for (size_t i = 0; i < N; i++) WANT(a[i] == i + 1.f);
    for (size_t i = 0; i < N; i += 997) WANT(c[i] == 5);
}
CASE(flags) {
    for (unsigned f : {0u, 1u, 2u, 3u, 4u, 7u, 8u, 64u}) { void *h = nullptr; printf("%u: ", f); SAY(cudaHostAlloc(&h, 4096, f)); unsigned seen = 99;
    if (h) { CHECK(cudaHostGetFlags(&seen, h)); printf("flags %u\n", seen); CHECK(cudaFreeHost(h)); } }
    cudaGetLastError(); unsigned seen; SAY(cudaHostGetFlags(&seen, &seen)); SAY(cudaHostGetFlags(&seen, device(4))); void *p;
    SAY(cudaHostGetDevicePointer(&p, &seen, 0)); cudaGetLastError();
}
CASE(registered) {
    auto h = (uint32_t *)aligned_alloc(4096, N * 4); fill_host(h, N, 1); SAY(cudaHostRegister(h, N * 4, cudaHostRegisterMapped | cudaHostRegisterPortable));
    uint32_t *d; CHECK(cudaHostGetDevicePointer(&d, h, 0)); add<<<256, 256>>>(d, N, 3u); CHECK(cudaDeviceSynchronize());
    for (size_t i = 0; i < N; i++) WANT(h[i] == value(i, 1) + 3);
    SAY(cudaHostRegister(h, 4096, 0)); SAY(cudaHostRegister(h + 1024, 4096, 0)); SAY(cudaHostUnregister(h + 1024)); SAY(cudaHostUnregister(h));
    SAY(cudaHostUnregister(h)); SAY(cudaHostRegister(nullptr, 4096, 0)); SAY(cudaHostRegister(h, 0, 0)); cudaGetLastError();
    SAY(cudaHostRegister(h + 1, 100, 0)); SAY(cudaHostUnregister(h + 1)); SAY(cudaHostRegister(device(4096), 4096, 0)); cudaGetLastError();
}
CASE(registered_file) {
    FILE *f = tmpfile(); WANT(f && !ftruncate(fileno(f), N * 4)); auto h = (uint32_t *)mmap(nullptr, N * 4, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(f), 0);
    WANT(h != MAP_FAILED); fill_host(h, N, 2); CHECK(cudaHostRegister(h, N * 4, 0)); add<<<64, 256>>>(h, N, 1u); CHECK(cudaDeviceSynchronize());
    WANT(h[77] == value(77, 2) + 1); CHECK(cudaHostUnregister(h)); WANT(!munmap(h, N * 4));
    auto r = (uint32_t *)mmap(nullptr, N * 4, PROT_READ, MAP_SHARED, fileno(f), 0); int can;
    CHECK(cudaDeviceGetAttribute(&can, cudaDevAttrHostRegisterReadOnlySupported, 0)); printf("read only: %d\n", can);
    SAY(cudaHostRegister(r, N * 4, cudaHostRegisterReadOnly)); cudaGetLastError();
}
CASE(shared_between_processes) {  // pinned by a parent and by its exec'd child: one counts in the memory of the other
    FILE *f = tmpfile(); WANT(f && !ftruncate(fileno(f), N * 4)); auto h = (uint32_t *)mmap(nullptr, N * 4, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(f), 0);
    CHECK(cudaHostRegister(h, N * 4, 0)); fill<<<64, 256>>>(h, N, 5); CHECK(cudaDeviceSynchronize());
    int fd = dup(fileno(f)); WANT(!result(start("sharer", fd))); for (size_t i = 0; i < N; i++) WANT(h[i] == value(i, 5) + 2);
}
CHILD(sharer) {
    auto h = (uint32_t *)mmap(nullptr, N * 4, PROT_READ | PROT_WRITE, MAP_SHARED, stoi(args[0]), 0); WANT(h != MAP_FAILED);
    CHECK(cudaHostRegister(h, N * 4, 0)); add<<<64, 256>>>(h, N, 2u); CHECK(cudaDeviceSynchronize());
}
CASE(system_atomics) {  // card and processor on the same words of mapped memory
    int *h; CHECK(cudaHostAlloc(&h, 20, cudaHostAllocMapped)); memset(h, 0, 20); atomics<<<64, 256>>>(h);
    for (int i = 0; i < 10000; i++) __atomic_fetch_add(h, 1, __ATOMIC_SEQ_CST); CHECK(cudaDeviceSynchronize());
    int native; CHECK(cudaDeviceGetAttribute(&native, cudaDevAttrHostNativeAtomicSupported, 0));
    printf("native %d max %d exchanged %d or %x swapped %d\n", native, h[1], h[2], h[3], h[4]); if (native) WANT(h[0] == 64 * 256 + 10000);
}
CASE(driver_host) {
    void *p, *q; CHECK(cudaFree(0)); CHECK(cuMemAllocHost(&p, 5000)); CHECK(cuMemHostAlloc(&q, 5000, CU_MEMHOSTALLOC_DEVICEMAP)); CUdeviceptr d; unsigned f;
    CHECK(cuMemHostGetDevicePointer(&d, q, 0)); CHECK(cuMemHostGetFlags(&f, q)); printf("flags %u\n", f); CHECK(cuMemsetD8(d, 3, 5000));
    CHECK(cuCtxSynchronize()); for (int i = 0; i < 5000; i++) WANT(((char *)q)[i] == 3); CHECK(cuMemFreeHost(p)); CHECK(cuMemFreeHost(q));
    SAY(cuMemFreeHost(q)); SAY(cuMemHostAlloc(&q, 0, 0));
}
CASE(pageable_attributes) {
    for (auto [n, a] : {std::pair<const char *, cudaDeviceAttr>{"pageable", cudaDevAttrPageableMemoryAccess}, {"tables", cudaDevAttrPageableMemoryAccessUsesHostPageTables}, {"register", cudaDevAttrHostRegisterSupported}, {"same pointer", cudaDevAttrCanUseHostPointerForRegisteredMem}, {"map", cudaDevAttrCanMapHostMemory}}) { int v;
    CHECK(cudaDeviceGetAttribute(&v, a, 0)); printf("%s %d\n", n, v); }
}
CASE(pageable_access) {  // where the card reads malloc'ed memory by itself
    int can; CHECK(cudaDeviceGetAttribute(&can, cudaDevAttrPageableMemoryAccess, 0)); if (!can) skip("pageable memory is out of the card's reach");
    auto v = pattern<uint32_t>(N, 3); add<<<64, 256>>>(v.data(), N, 1u); CHECK(cudaDeviceSynchronize());
    for (size_t i = 0; i < N; i++) WANT(v[i] == value(i, 3) + 1);
}
