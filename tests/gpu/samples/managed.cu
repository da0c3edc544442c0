// Managed memory that the program asked for itself: it must stay managed, readable by the processor, and answer hints and
// questions as before, though the interposer makes managed memory of everything else.
#include "check.h"
const size_t N = MiB;
__managed__ uint32_t counter = 5, table[1000];
__device__ __managed__ struct { int a; double b; } record = {1, 2.5};
__global__ void touch() { if (!threadIdx.x) { counter++; record.a++; record.b *= 2; } table[threadIdx.x] = threadIdx.x; }
__global__ void atomics(int *p) { atomicAdd_system(p, 1); }
struct Managed { void *operator new(size_t n) { void *p; CHECK(cudaMallocManaged(&p, n)); CHECK(cudaDeviceSynchronize()); return p; }
void operator delete(void *p) { CHECK(cudaDeviceSynchronize()); CHECK(cudaFree(p)); } };
struct List : Managed { int v; List *next; };
__global__ void walk(List *l, int *sum) { for (; l; l = l->next) { *sum += l->v; l->v *= 2; } }
static cudaMemLocation card{cudaMemLocationTypeDevice, 0}, host{cudaMemLocationTypeHost, 0};
static uint32_t *managed(size_t n, unsigned flags = cudaMemAttachGlobal) { uint32_t *p; CHECK(cudaMallocManaged(&p, n * 4, flags)); return p; }

CASE(both_sides) {
    auto p = managed(N); for (int round = 0; round < 5; round++) { fill_host(p, N, round); add<<<256, 256>>>(p, N, 1u); CHECK(cudaDeviceSynchronize());
    for (size_t i = 0; i < N; i++) WANT(p[i] == value(i, round) + 1); } CHECK(cudaFree(p));
}
CASE(variables) {
    touch<<<1, 1000>>>(); CHECK(cudaDeviceSynchronize()); printf("%u %d %g\n", counter, record.a, record.b);
    for (int i = 0; i < 1000; i++) WANT(table[i] == uint32_t(i)); counter = 9; touch<<<1, 1000>>>(); CHECK(cudaDeviceSynchronize()); printf("%u\n", counter);
}
CASE(linked_list) {
    List *head = nullptr; for (int i = 0; i < 50; i++) { auto l = new List; l->v = i; l->next = head; head = l; } auto sum = (int *)managed(1); *sum = 0;
    walk<<<1, 1>>>(head, sum); CHECK(cudaDeviceSynchronize()); WANT(*sum == 1225); for (auto l = head; l;) { auto n = l->next; WANT(l->v % 2 == 0); delete l;
    l = n; }
}
CASE(processor_meanwhile) {  // the processor uses other managed memory, and the same page, while a kernel runs
    int can; CHECK(cudaDeviceGetAttribute(&can, cudaDevAttrConcurrentManagedAccess, 0)); printf("concurrent %d\n", can);
    if (!can) skip("no concurrent managed access");
    auto p = managed(N), flag = managed(1024); *flag = 0; fill_host(p, N, 1); await<<<1, 1>>>((int *)flag); for (size_t i = 0; i < N; i++) p[i]++;
    __atomic_store_n(flag, 1, __ATOMIC_SEQ_CST); CHECK(cudaDeviceSynchronize()); add<<<256, 256>>>(p, N, 1u); CHECK(cudaDeviceSynchronize());
    for (size_t i = 0; i < N; i++) WANT(p[i] == value(i, 1) + 2);
}
CASE(system_atomics) {
    auto p = (int *)managed(1); *p = 0; atomics<<<64, 256>>>(p); for (int i = 0; i < 1000; i++) __atomic_fetch_add(p, 1, __ATOMIC_SEQ_CST);
    CHECK(cudaDeviceSynchronize()); printf("%d\n", *p);
}
CASE(attach) {
    cudaStream_t s; CHECK(cudaStreamCreate(&s)); auto p = managed(N, cudaMemAttachHost), q = managed(N); fill_host(p, N, 1);
    CHECK(cudaStreamAttachMemAsync(s, p, 0, cudaMemAttachSingle)); CHECK(cudaStreamSynchronize(s)); add<<<64, 256, 0, s>>>(p, N, 1u);
    CHECK(cudaStreamSynchronize(s)); WANT(p[5] == value(5, 1) + 1);
    CHECK(cudaStreamAttachMemAsync(s, p, 0, cudaMemAttachGlobal)); CHECK(cudaStreamAttachMemAsync(s, q, 0, cudaMemAttachHost)); CHECK(cudaStreamSynchronize(s));
    add<<<64, 256>>>(p, N, 1u); CHECK(cudaDeviceSynchronize()); WANT(p[5] == value(5, 1) + 2);
    SAY(cudaStreamAttachMemAsync(s, device(4096), 0, cudaMemAttachSingle)); SAY(cudaStreamAttachMemAsync(s, p, 4, cudaMemAttachSingle));
    SAY(cudaMallocManaged(&p, 4, 77)); cudaGetLastError();
}
CASE(prefetch) {
    auto p = managed(8 * N); fill_host(p, 8 * N, 1); CHECK(cudaMemPrefetchAsync(p, 32 * N, card, 0, 0)); add<<<256, 256>>>(p, 8 * N, 1u);
    CHECK(cudaMemPrefetchAsync(p, 32 * N, host, 0, 0)); CHECK(cudaDeviceSynchronize()); for (size_t i = 0; i < 8 * N; i++) WANT(p[i] == value(i, 1) + 1);
    CHECK(cudaMemPrefetchAsync(p + 1000, 12345, card, 0, 0));
    cudaMemLocation numa{cudaMemLocationTypeHostNuma, 0}, near{cudaMemLocationTypeHostNumaCurrent, 0}, bad{cudaMemLocationTypeDevice, 99};
    SAY(cudaMemPrefetchAsync(p, 32 * N, numa, 0, 0)); SAY(cudaMemPrefetchAsync(p, 32 * N, near, 0, 0)); SAY(cudaMemPrefetchAsync(p, 4, bad, 0, 0));
    SAY(cudaMemPrefetchAsync(p, 0, card, 0, 0)); SAY(cudaMemPrefetchAsync(p, 4, card, 1, 0)); SAY(cudaDeviceSynchronize()); cudaGetLastError();
}
CASE(prefetch_device_memory) {  // natively an error: it is no managed memory
    auto p = device(N), small = device(16); SAY(cudaMemPrefetchAsync(p, N * 4, card, 0, 0)); SAY(cudaMemPrefetchAsync(p, N * 4, host, 0, 0));
    SAY(cudaMemAdvise(p, N * 4, cudaMemAdviseSetReadMostly, card)); SAY(cudaMemAdvise(small, 64, cudaMemAdviseSetPreferredLocation, card)); int v = 77;
    SAY(cudaMemRangeGetAttribute(&v, 4, cudaMemRangeAttributeReadMostly, p, N * 4)); SAY(cudaGetLastError());
}
CASE(advice) {
    auto p = managed(N); auto one = [&](cudaMemRangeAttribute a) { int v = -99; CHECK(cudaMemRangeGetAttribute(&v, 4, a, p, N * 4)); return v; };
    printf("%d %d %d\n", one(cudaMemRangeAttributeReadMostly), one(cudaMemRangeAttributePreferredLocation), one(cudaMemRangeAttributeLastPrefetchLocation));
    fill_host(p, N, 2);
    CHECK(cudaMemAdvise(p, N * 4, cudaMemAdviseSetReadMostly, card)); CHECK(cudaMemAdvise(p, N * 4, cudaMemAdviseSetPreferredLocation, host));
    CHECK(cudaMemAdvise(p, N * 4, cudaMemAdviseSetAccessedBy, card));
    printf("%d %d\n", one(cudaMemRangeAttributeReadMostly), one(cudaMemRangeAttributePreferredLocation));
    CHECK(cudaMemPrefetchAsync(p, N * 4, card, 0, 0)); CHECK(cudaDeviceSynchronize()); printf("%d\n", one(cudaMemRangeAttributeLastPrefetchLocation));
    int by[4]; CHECK(cudaMemRangeGetAttribute(by, 16, cudaMemRangeAttributeAccessedBy, p, N * 4)); printf("by %d %d %d %d\n", by[0], by[1], by[2], by[3]);
    int type, id; void *out[] = {&type, &id}; size_t sizes[] = {4, 4};
    cudaMemRangeAttribute which[] = {cudaMemRangeAttributePreferredLocationType, cudaMemRangeAttributePreferredLocationId};
    CHECK(cudaMemRangeGetAttributes(out, sizes, which, 2, p, N * 4)); printf("type %d\n", type);
    CHECK(cudaMemAdvise(p, N * 4, cudaMemAdviseUnsetReadMostly, card));
    SAY(cudaMemAdvise(p, N * 4, cudaMemAdviseSetPreferredLocation, {cudaMemLocationTypeHostNuma, 0}));
    SAY(cudaMemAdvise(p, N * 4, cudaMemAdviseUnsetPreferredLocation, card)); SAY(cudaMemAdvise(p, N * 4, (cudaMemoryAdvise)99, card)); cudaGetLastError();
    add<<<64, 256>>>(p, N, 1u); CHECK(cudaDeviceSynchronize()); for (size_t i = 0; i < N; i++) WANT(p[i] == value(i, 2) + 1);
}
CASE(batches) {
    auto p = managed(N), q = managed(N); cudaStream_t s; CHECK(cudaStreamCreate(&s)); fill_host(p, N, 1); fill_host(q, N, 2); void *all[] = {p, q};
    size_t sizes[] = {N * 4, N * 4}, at[] = {0};
    SAY(cudaMemPrefetchBatchAsync(all, sizes, 2, &card, at, 1, 0, s)); add<<<64, 256, 0, s>>>(p, N, 1u); CHECK(cudaStreamSynchronize(s));
    WANT(p[9] == value(9, 1) + 1 && q[9] == value(9, 2)); SAY(cudaMemDiscardBatchAsync(all, sizes, 1, 0, s)); fill<<<64, 256, 0, s>>>(p, N, 7);
    SAY(cudaMemDiscardAndPrefetchBatchAsync(all + 1, sizes, 1, &card, at, 1, 0, s)); fill<<<64, 256, 0, s>>>(q, N, 8); CHECK(cudaStreamSynchronize(s));
    WANT(!wrong(p, N, 7) && !wrong(q, N, 8)); cudaGetLastError();
}
CASE(streams_of_tasks) {  // as UnifiedMemoryStreams: threads take small tasks on the processor, large ones on the card
    std::vector<std::thread> all;
    for (int t = 0; t < 4; t++) all.emplace_back([t] { cudaStream_t s; CHECK(cudaStreamCreate(&s)); for (int i = 0; i < 10; i++) { size_t n = 1000 * (i + 1); auto p = managed(n); CHECK(cudaStreamAttachMemAsync(s, p, 0, i % 3 ? cudaMemAttachSingle : cudaMemAttachHost)); CHECK(cudaStreamSynchronize(s)); fill_host(p, n, t); if (i % 3) { add<<<4, 256, 0, s>>>(p, n, 1u); CHECK(cudaStreamSynchronize(s)); } else for (size_t k = 0; k < n; k++) p[k]++; for (size_t k = 0; k < n; k++) WANT(p[k] == value(k, t) + 1); CHECK(cudaFree(p)); } CHECK(cudaStreamDestroy(s)); });
    for (auto &t : all) t.join();
}
CASE(copies) {
    auto p = managed(N), q = managed(N); auto d = device(N); fill_host(p, N, 1); CHECK(cudaMemcpy(d, p, N * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(q, d, N * 4, cudaMemcpyDeviceToHost)); WANT(!wrong(q, N, 1)); CHECK(cudaMemset(q, 0, N * 4)); CHECK(cudaDeviceSynchronize());
    WANT(!q[N - 1]); CHECK(cudaMemcpy(q, p, N * 4, cudaMemcpyDeviceToDevice)); CHECK(cudaDeviceSynchronize()); WANT(!wrong(q, N, 1));
}
CASE(driver_managed) {
    CHECK(cudaFree(0)); CUdeviceptr p = 0; CHECK(cuMemAllocManaged(&p, 4 * N, CU_MEM_ATTACH_GLOBAL)); fill_host((uint32_t *)p, N, 1);
    add<<<64, 256>>>((uint32_t *)p, N, 1u); CHECK(cuCtxSynchronize()); WANT(((uint32_t *)p)[3] == value(3, 1) + 1); CHECK(cuMemFree(p));
    SAY(cuMemAllocManaged(&p, 0, 1)); SAY(cuMemAllocManaged(&p, 4, 0)); SAY(cuMemAllocManaged(nullptr, 4, 1));
}
