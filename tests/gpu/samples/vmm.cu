// Virtual memory management: reserve, create, map, grow, share. An interposer counts handles and mappings; nothing of it may
// change what addresses, properties and errors a program sees.
#include "check.h"
static CUmemAllocationProp properties(bool shared = false, bool compressed = false) {
    CUmemAllocationProp p{}; p.type = CU_MEM_ALLOCATION_TYPE_PINNED; p.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    if (shared) p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    if (compressed) p.allocFlags.compressionType = CU_MEM_ALLOCATION_COMP_GENERIC; return p;
}
static size_t grain() {
    CHECK(cudaFree(0)); auto p = properties(); size_t g; CHECK(cuMemGetAllocationGranularity(&g, &p, CU_MEM_ALLOC_GRANULARITY_MINIMUM)); return g;
}
static CUmemGenericAllocationHandle create(size_t n, bool shared = false) {
    auto p = properties(shared); CUmemGenericAllocationHandle h; CHECK(cuMemCreate(&h, n, &p, 0)); return h;
}
static const CUmemAccessDesc both{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
static CUdeviceptr map(CUdeviceptr at, size_t n, CUmemGenericAllocationHandle h) {
    CHECK(cuMemMap(at, n, 0, h, 0)); CHECK(cuMemSetAccess(at, n, &both, 1)); return at;
}
static CUdeviceptr reserve(size_t n, CUdeviceptr hint = 0) { CUdeviceptr p; CHECK(cuMemAddressReserve(&p, n, 0, hint, 0)); return p; }

CASE(map_and_add) {
    size_t g = grain(), n = 8 * g; printf("granularity %zu\n", g); auto p = reserve(n); auto h = create(n); map(p, n, h); CHECK(cuMemRelease(h));
    fill<<<64, 256>>>((uint32_t *)p, n / 4, 1); add<<<64, 256>>>((uint32_t *)p, n / 4, 0u); CHECK(cudaDeviceSynchronize());
    WANT(!wrong_on_device((uint32_t *)p, n / 4, 1)); CHECK(cuMemUnmap(p, n)); CHECK(cuMemAddressFree(p, n));
}
CASE(growing_vector) {  // the old part stays where it is
    size_t g = grain(), used = 0; auto p = reserve(64 * g); std::vector<CUmemGenericAllocationHandle> all;
    for (int i = 1; i <= 10; i++) { all.push_back(create(i * g)); map(p + used, i * g, all.back()); fill<<<64, 256>>>((uint32_t *)(p + used), i * g / 4, i);
    used += i * g; } CHECK(cudaDeviceSynchronize()); size_t at = 0; for (int i = 1; i <= 10; i++) { WANT(!wrong_on_device((uint32_t *)(p + at), i * g / 4, i));
    at += i * g; }
    std::vector<char> h(used); CHECK(cudaMemcpy(h.data(), (void *)p, used, cudaMemcpyDefault)); CHECK(cuMemUnmap(p, used));
    for (auto a : all) CHECK(cuMemRelease(a)); CHECK(cuMemAddressFree(p, 64 * g));
}
CASE(two_mappings) {
    size_t g = grain(); auto h = create(g); auto p = map(reserve(g), g, h), q = map(reserve(g), g, h); CHECK(cuMemRelease(h));
    fill<<<64, 256>>>((uint32_t *)p, g / 4, 1); WANT(!wrong_on_device((uint32_t *)q, g / 4, 1)); CHECK(cuMemUnmap(p, g));
    fill<<<64, 256>>>((uint32_t *)q, g / 4, 2); WANT(!wrong_on_device((uint32_t *)q, g / 4, 2)); CHECK(cuMemUnmap(q, g));
}
CASE(hints) {
    size_t g = grain(); auto p = reserve(8 * g); CHECK(cuMemAddressFree(p, 8 * g)); auto q = reserve(8 * g, p); printf("same %d\n", p == q); CUdeviceptr r;
    SAY(cuMemAddressReserve(&r, 123, 0, 0, 0)); SAY(cuMemAddressReserve(&r, 0, 0, 0, 0)); SAY(cuMemAddressReserve(&r, g, 3, 0, 0));
    SAY(cuMemAddressFree(q + g, g)); SAY(cuMemAddressReserve(&r, size_t(1) << 40, 0, 0, 0));
}
CASE(mistakes) {
    size_t g = grain(); auto p = reserve(4 * g); auto pr = properties(); CUmemGenericAllocationHandle h; SAY(cuMemCreate(&h, g + 1, &pr, 0));
    SAY(cuMemCreate(&h, 0, &pr, 0)); SAY(cuMemCreate(&h, g, &pr, 5)); SAY(cuMemCreate(nullptr, g, &pr, 0)); h = create(g); SAY(cuMemMap(p, 2 * g, 0, h, 0));
    SAY(cuMemMap(p, g, 0, h, 0)); SAY(cuMemMap(p, g, 0, h, 0)); SAY(cuMemUnmap(p + g, g)); SAY(cuMemAddressFree(p, 4 * g));
    SAY(cuMemSetAccess(p + g, g, &both, 1)); SAY(cuMemSetAccess(p, g, &both, 1)); SAY(cuMemUnmap(p, g)); SAY(cuMemUnmap(p, g)); SAY(cuMemRelease(h));
    SAY(cuMemAddressFree(p, 4 * g)); pr.location.id = 99; SAY(cuMemCreate(&h, g, &pr, 0));
}
CASE(larger_than_card) {
    grain(); size_t free, total; CHECK(cuMemGetInfo(&free, &total)); auto p = properties(); CUmemGenericAllocationHandle h;
    SAY(cuMemCreate(&h, (total / GiB + 2) * GiB, &p, 0)); SAY(cuMemCreate(&h, size_t(1) << 50, &p, 0)); auto q = map(reserve(GiB), GiB, create(GiB));
    CHECK(cuMemsetD8(q, 1, GiB)); CHECK(cuCtxSynchronize());
}
CASE(handles) {
    size_t g = grain(); auto h = create(g); auto p = map(reserve(g), g, h); CUmemGenericAllocationHandle k; CHECK(cuMemRetainAllocationHandle(&k, (void *)p));
    WANT(k == h); CHECK(cuMemRelease(k)); CUmemAllocationProp pr; CHECK(cuMemGetAllocationPropertiesFromHandle(&pr, h));
    printf("%d %d %d %d\n", pr.type, pr.location.type, pr.location.id, pr.allocFlags.compressionType); unsigned long long f;
    CUmemLocation here{CU_MEM_LOCATION_TYPE_DEVICE, 0}; CHECK(cuMemGetAccess(&f, &here, p)); printf("access %llu\n", f);
    SAY(cuMemRetainAllocationHandle(&k, (void *)device(MiB))); SAY(cuMemRetainAllocationHandle(&k, &k)); int t = 0;
    CHECK(cuPointerGetAttribute(&t, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p)); size_t size; CUdeviceptr base; CHECK(cuMemGetAddressRange(&base, &size, p + 5));
    printf("type %d size %zu\n", t, size); cudaPointerAttributes a; CHECK(cudaPointerGetAttributes(&a, (void *)p)); printf("runtime %d\n", a.type);
    SAY(cuMemFree(p));
}
CASE(compressible) {
    size_t g = grain(); int can; CHECK(cuDeviceGetAttribute(&can, CU_DEVICE_ATTRIBUTE_GENERIC_COMPRESSION_SUPPORTED, 0)); printf("compression %d\n", can);
    auto p = properties(false, true); CUmemGenericAllocationHandle h; auto r = cuMemCreate(&h, 16 * g, &p, 0); printf("%s\n", said(r));
    if (r) skip("no compressible memory"); CHECK(cuMemGetAllocationPropertiesFromHandle(&p, h)); printf("granted %d\n", p.allocFlags.compressionType);
    auto q = map(reserve(16 * g), 16 * g, h); fill<<<64, 256>>>((uint32_t *)q, 4 * g, 1); WANT(!wrong_on_device((uint32_t *)q, 4 * g, 1));
}
CASE(with_the_processor) {
    CHECK(cudaFree(0)); CUmemAllocationProp p{}; p.type = CU_MEM_ALLOCATION_TYPE_PINNED; p.location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, 0}; size_t g;
    auto r = cuMemGetAllocationGranularity(&g, &p, CU_MEM_ALLOC_GRANULARITY_MINIMUM); CUmemGenericAllocationHandle h; if (!r) r = cuMemCreate(&h, 4 * g, &p, 0);
    printf("%s\n", said(r)); if (r) skip("no host memory this way"); auto q = reserve(4 * g); CHECK(cuMemMap(q, 4 * g, 0, h, 0));
    CUmemAccessDesc a[] = {both, {{CU_MEM_LOCATION_TYPE_HOST_NUMA, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE}}; CHECK(cuMemSetAccess(q, 4 * g, a, 2));
    fill<<<64, 256>>>((uint32_t *)q, g, 1); CHECK(cudaDeviceSynchronize()); WANT(!wrong((uint32_t *)q, g, 1));
}
CASE(exported) {  // by descriptor, to an exec'd child
    size_t g = grain(); int s[2], fd; WANT(!socketpair(AF_UNIX, SOCK_STREAM, 0, s)); auto h = create(4 * g, true); auto p = map(reserve(4 * g), 4 * g, h);
    fill<<<64, 256>>>((uint32_t *)p, g, 1); CHECK(cudaDeviceSynchronize());
    CHECK(cuMemExportToShareableHandle(&fd, h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)); auto child = start("importer", s[1], 4 * g);
    send_descriptor(s[0], fd); close(fd); WANT(!result(child)); WANT(!wrong_on_device((uint32_t *)p, g, 2)); auto k = create(g);
    SAY(cuMemExportToShareableHandle(&fd, k, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
}
CHILD(importer) {
    size_t n = stoul(args[1]); grain(); int fd = receive_descriptor(stoi(args[0])); CUmemGenericAllocationHandle h;
    CHECK(cuMemImportFromShareableHandle(&h, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)); close(fd); auto p = map(reserve(n), n, h);
    WANT(!wrong_on_device((uint32_t *)p, n / 4, 1)); fill<<<64, 256>>>((uint32_t *)p, n / 4, 2); CHECK(cudaDeviceSynchronize()); CHECK(cuMemUnmap(p, n));
    CHECK(cuMemRelease(h));
}
CASE(read_only) {
    size_t g = grain(); auto h = create(g); auto p = map(reserve(g), g, h), q = reserve(g); CHECK(cuMemMap(q, g, 0, h, 0));
    CUmemAccessDesc read{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READ}; CHECK(cuMemSetAccess(q, g, &read, 1));
    fill<<<64, 256>>>((uint32_t *)p, g / 4, 1); auto bad = device<unsigned>(1); CHECK(cudaMemset(bad, 0, 4)); count<<<64, 256>>>((uint32_t *)q, g / 4, 1, bad);
    unsigned w; CHECK(cudaMemcpy(&w, bad, 4, cudaMemcpyDeviceToHost)); WANT(!w); fill<<<1, 1>>>((uint32_t *)q, 1, 1); SAY(cudaDeviceSynchronize());
}
