// Stream-ordered memory: pools, thresholds, trimming, sharing with another process, and the mixtures with cudaMalloc and cudaFree.
// An interposer that counts this memory has to give it back in stream order; one that exchanges cudaMalloc meets foreign frees.
#include "check.h"
const size_t N = 4 * MiB;
static cudaMemPool_t pool(cudaMemAllocationHandleType handles = cudaMemHandleTypeNone, cudaMemLocationType where = cudaMemLocationTypeDevice) {
    cudaMemPoolProps p{}; p.allocType = cudaMemAllocationTypePinned; p.handleTypes = handles; p.location = {where, 0}; cudaMemPool_t m;
    CHECK(cudaMemPoolCreate(&m, &p)); return m;
}
static uint64_t level(cudaMemPool_t m, cudaMemPoolAttr a) { uint64_t v = 0; CHECK(cudaMemPoolGetAttribute(m, a, &v)); return v; }
template <class T = uint32_t> static T *async(size_t n, cudaStream_t s = 0) { T *p; CHECK(cudaMallocAsync(&p, n * sizeof(T), s)); return p; }

CASE(round_trip) {
    cudaStream_t s; CHECK(cudaStreamCreate(&s)); std::vector<uint32_t> h(N); for (int i = 0; i < 20; i++) { auto p = async(N, s);
    fill<<<256, 256, 0, s>>>(p, N, i); CHECK(cudaMemcpyAsync(h.data(), p, N * 4, cudaMemcpyDeviceToHost, s)); CHECK(cudaFreeAsync(p, s));
    CHECK(cudaStreamSynchronize(s)); WANT(!wrong(h.data(), N, i)); } CHECK(cudaStreamDestroy(s));
}
CASE(default_pool) {
    cudaMemPool_t m, now; CHECK(cudaDeviceGetDefaultMemPool(&m, 0)); CHECK(cudaDeviceGetMemPool(&now, 0)); WANT(m == now);
    printf("threshold %d follow %d opportunistic %d internal %d\n", int(level(m, cudaMemPoolAttrReleaseThreshold)), int(level(m, cudaMemPoolReuseFollowEventDependencies)), int(level(m, cudaMemPoolReuseAllowOpportunistic)), int(level(m, cudaMemPoolReuseAllowInternalDependencies)));
    uint64_t all = UINT64_MAX; CHECK(cudaMemPoolSetAttribute(m, cudaMemPoolAttrReleaseThreshold, &all)); WANT(level(m, cudaMemPoolAttrReleaseThreshold) == all);
    auto p = async(N); CHECK(cudaStreamSynchronize(0));
    printf("used %zu reserved %d\n", size_t(level(m, cudaMemPoolAttrUsedMemCurrent)), level(m, cudaMemPoolAttrReservedMemCurrent) >= N * 4);
    CHECK(cudaFreeAsync(p, 0)); CHECK(cudaStreamSynchronize(0));
    printf("used %zu kept %d high %zu\n", size_t(level(m, cudaMemPoolAttrUsedMemCurrent)), level(m, cudaMemPoolAttrReservedMemCurrent) >= N * 4, size_t(level(m, cudaMemPoolAttrUsedMemHigh)));
    CHECK(cudaMemPoolTrimTo(m, 0)); printf("reserved %zu\n", size_t(level(m, cudaMemPoolAttrReservedMemCurrent))); uint64_t zero = 0;
    CHECK(cudaMemPoolSetAttribute(m, cudaMemPoolAttrUsedMemHigh, &zero)); printf("high %zu\n", size_t(level(m, cudaMemPoolAttrUsedMemHigh)));
    SAY(cudaMemPoolSetAttribute(m, cudaMemPoolAttrUsedMemHigh, &all)); SAY(cudaMemPoolDestroy(m)); cudaGetLastError();
}
CASE(same_address_again) {
    cudaStream_t s; CHECK(cudaStreamCreate(&s)); auto p = async(N, s); CHECK(cudaFreeAsync(p, s)); auto q = async(N, s); printf("same %d\n", p == q);
    fill<<<64, 256, 0, s>>>(q, N, 1); CHECK(cudaStreamSynchronize(s)); WANT(!wrong_on_device(q, N, 1)); CHECK(cudaFreeAsync(q, s));
}
CASE(own_pool) {
    auto m = pool(); cudaStream_t s; CHECK(cudaStreamCreate(&s)); uint32_t *p, *q; CHECK(cudaMallocFromPoolAsync(&p, N * 4, m, s));
    fill<<<256, 256, 0, s>>>(p, N, 1); CHECK(cudaStreamSynchronize(s)); WANT(!wrong_on_device(p, N, 1)); CHECK(cudaDeviceSetMemPool(0, m)); q = async(N, s);
    CHECK(cudaStreamSynchronize(s)); printf("used %zu\n", size_t(level(m, cudaMemPoolAttrUsedMemCurrent)));
    cudaMemPool_t of = nullptr; CHECK(cuPointerGetAttribute(&of, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, CUdeviceptr(q))); WANT(of == m);
    CHECK(cudaFreeAsync(q, s)); CHECK(cudaFreeAsync(p, s)); CHECK(cudaMemPoolDestroy(m)); CHECK(cudaStreamSynchronize(s)); CHECK(cudaDeviceGetMemPool(&of, 0));
    cudaMemPool_t first; CHECK(cudaDeviceGetDefaultMemPool(&first, 0)); printf("default again %d\n", of == first);
}
CASE(limited_pool) {
    cudaMemPoolProps p{}; p.allocType = cudaMemAllocationTypePinned; p.location = {cudaMemLocationTypeDevice, 0}; p.maxSize = 64 * MiB; cudaMemPool_t m;
    SAY(cudaMemPoolCreate(&m, &p)); void *a, *b; SAY(cudaMallocFromPoolAsync(&a, 48 * MiB, m, 0)); SAY(cudaMallocFromPoolAsync(&b, 48 * MiB, m, 0));
    SAY(cudaGetLastError()); CHECK(cudaFreeAsync(a, 0)); SAY(cudaMallocFromPoolAsync(&b, 48 * MiB, m, 0));
}
CASE(across_streams) {  // freed in one stream, had again in another: event dependencies keep the order
    cudaStream_t s, t; cudaEvent_t e; CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking)); CHECK(cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&e)); auto bad = device<unsigned>(1); CHECK(cudaMemset(bad, 0, 4)); CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < 50; i++) { auto p = async(N, s); fill<<<64, 256, 0, s>>>(p, N, i); CHECK(cudaEventRecord(e, s)); CHECK(cudaStreamWaitEvent(t, e, 0));
    count<<<64, 256, 0, t>>>(p, N, i, bad); CHECK(cudaFreeAsync(p, t)); CHECK(cudaEventRecord(e, t)); CHECK(cudaStreamWaitEvent(s, e, 0)); }
    CHECK(cudaDeviceSynchronize()); unsigned w; CHECK(cudaMemcpy(&w, bad, 4, cudaMemcpyDeviceToHost)); WANT(!w);
}
CASE(mixed_frees) {
    auto a = device(N); auto b = async(N); auto small = device(16); CHECK(cudaStreamSynchronize(0)); fill<<<64, 256>>>(a, N, 1); SAY(cudaFreeAsync(a, 0));
    SAY(cudaFree(b)); SAY(cudaFreeAsync(small, 0)); SAY(cudaDeviceSynchronize()); SAY(cudaFreeAsync(b, 0)); SAY(cudaFreeAsync(nullptr, 0));
    SAY(cudaFreeAsync((void *)4096, 0)); void *m; CHECK(cudaMallocManaged(&m, MiB)); SAY(cudaFreeAsync(m, 0)); SAY(cudaGetLastError()); auto c = device(N);
    fill<<<64, 256>>>(c, N, 3); WANT(!wrong_on_device(c, N, 3));
}
CASE(many_of_cudaMalloc_freed_async) {  // 1.6 GiB in all, if they were not given back
    cudaStream_t s; CHECK(cudaStreamCreate(&s)); for (int i = 0; i < 100; i++) { auto p = device(N); fill<<<64, 256, 0, s>>>(p, N, i);
    CHECK(cudaFreeAsync(p, s)); } CHECK(cudaStreamSynchronize(s));
}
CASE(too_much) {
    void *p; size_t free, total; CHECK(cudaMemGetInfo(&free, &total)); SAY(cudaMallocAsync(&p, total + GiB, 0)); SAY(cudaGetLastError());
    SAY(cudaMallocAsync(&p, 0, 0)); printf("null %d\n", p == nullptr); SAY(cudaMallocAsync(nullptr, 4, 0)); SAY(cudaMallocAsync(&p, size_t(1) << 50, 0));
    SAY(cudaMallocFromPoolAsync(&p, 4, nullptr, 0)); cudaGetLastError(); auto q = async(N); fill<<<64, 256>>>(q, N, 1); WANT(!wrong_on_device(q, N, 1));
}
CASE(access) {
    auto m = pool(); cudaMemAccessFlags f; cudaMemLocation here{cudaMemLocationTypeDevice, 0}; CHECK(cudaMemPoolGetAccess(&f, m, &here)); printf("%d\n", f);
    cudaMemAccessDesc d{here, cudaMemAccessFlagsProtReadWrite}; SAY(cudaMemPoolSetAccess(m, &d, 1)); d.flags = cudaMemAccessFlagsProtNone;
    SAY(cudaMemPoolSetAccess(m, &d, 1)); d.location.id = 99; SAY(cudaMemPoolSetAccess(m, &d, 1)); cudaGetLastError();
}
CASE(reuse_policies) {
    cudaMemPool_t m = pool(); int off = 0, on = 1, seen;
    for (auto a : {cudaMemPoolReuseFollowEventDependencies, cudaMemPoolReuseAllowOpportunistic, cudaMemPoolReuseAllowInternalDependencies}) { CHECK(cudaMemPoolSetAttribute(m, a, &off));
    CHECK(cudaMemPoolGetAttribute(m, a, &seen)); printf("%d", seen); CHECK(cudaMemPoolSetAttribute(m, a, &on)); } puts("");
}
CASE(host_pool) {  // since CUDA 13 a pool may lie with the processor
    cudaMemPoolProps p{}; p.allocType = cudaMemAllocationTypePinned; p.location = {cudaMemLocationTypeHost, 0}; cudaMemPool_t m;
    auto r = cudaMemPoolCreate(&m, &p); printf("host: %s\n", said(r)); cudaGetLastError(); if (r) { p.location = {cudaMemLocationTypeHostNuma, 0};
    r = cudaMemPoolCreate(&m, &p); printf("node: %s\n", said(r)); } if (r) skip("no pools with the processor");
    uint32_t *q; SAY(cudaMallocFromPoolAsync(&q, N * 4, m, 0)); fill<<<64, 256>>>(q, N, 1); CHECK(cudaStreamSynchronize(0)); WANT(!wrong(q, N, 1));
    CHECK(cudaFreeAsync(q, 0)); CHECK(cudaStreamSynchronize(0)); CHECK(cudaMemPoolDestroy(m));
}
CASE(managed_pool) {
    cudaMemPoolProps p{}; p.allocType = cudaMemAllocationTypeManaged; p.location = {cudaMemLocationTypeDevice, 0}; cudaMemPool_t m;
    auto r = cudaMemPoolCreate(&m, &p); printf("%s\n", said(r)); if (r) skip("no managed pools"); uint32_t *q; CHECK(cudaMallocFromPoolAsync(&q, N * 4, m, 0));
    fill<<<64, 256>>>(q, N, 1); CHECK(cudaStreamSynchronize(0)); WANT(!wrong(q, N, 1)); cudaPointerAttributes a; CHECK(cudaPointerGetAttributes(&a, q));
    printf("type %d\n", a.type); CHECK(cudaFreeAsync(q, 0)); CHECK(cudaStreamSynchronize(0)); CHECK(cudaMemPoolDestroy(m));
}
CASE(current_pools) {
    cudaMemLocation here{cudaMemLocationTypeDevice, 0}; cudaMemPool_t m, d; SAY(cudaMemGetDefaultMemPool(&m, &here, cudaMemAllocationTypePinned));
    CHECK(cudaDeviceGetDefaultMemPool(&d, 0)); WANT(m == d); SAY(cudaMemGetMemPool(&m, &here, cudaMemAllocationTypePinned)); WANT(m == d);
}
CASE(exported) {  // as streamOrderedAllocationIPC: the pool by descriptor, the pointer by its export data, to an exec'd child
    int s[2]; WANT(!socketpair(AF_UNIX, SOCK_STREAM, 0, s)); auto m = pool(cudaMemHandleTypePosixFileDescriptor); uint32_t *p;
    CHECK(cudaMallocFromPoolAsync(&p, N * 4, m, 0)); fill<<<64, 256>>>(p, N, 5); CHECK(cudaStreamSynchronize(0)); int fd;
    CHECK(cudaMemPoolExportToShareableHandle(&fd, m, cudaMemHandleTypePosixFileDescriptor, 0)); cudaMemPoolPtrExportData d;
    CHECK(cudaMemPoolExportPointer(&d, p));
    auto child = start("importer", s[1]); send_descriptor(s[0], fd); put(s[0], d); WANT(!result(child)); WANT(!wrong_on_device(p, N, 6)); close(fd);
    CHECK(cudaFreeAsync(p, 0)); CHECK(cudaStreamSynchronize(0)); CHECK(cudaMemPoolDestroy(m));
}
CHILD(importer) {
    int s = stoi(args[0]), fd = receive_descriptor(s); auto d = get<cudaMemPoolPtrExportData>(s); cudaMemPool_t m;
    CHECK(cudaMemPoolImportFromShareableHandle(&m, (void *)(intptr_t)fd, cudaMemHandleTypePosixFileDescriptor, 0));
    cudaMemAccessDesc a{{cudaMemLocationTypeDevice, 0}, cudaMemAccessFlagsProtReadWrite}; CHECK(cudaMemPoolSetAccess(m, &a, 1)); uint32_t *p;
    CHECK(cudaMemPoolImportPointer((void **)&p, m, &d)); WANT(!wrong_on_device(p, N, 5)); fill<<<64, 256>>>(p, N, 6); CHECK(cudaDeviceSynchronize());
    CHECK(cudaFree(p));
}
CASE(destroyed_with_life) {
    auto m = pool(); uint32_t *p; CHECK(cudaMallocFromPoolAsync(&p, N * 4, m, 0)); CHECK(cudaMemPoolDestroy(m)); fill<<<64, 256>>>(p, N, 3);
    WANT(!wrong_on_device(p, N, 3)); CHECK(cudaFreeAsync(p, 0)); CHECK(cudaDeviceSynchronize());
}
