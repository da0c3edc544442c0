// Two cards and more: streams and memory on each, copies between them, kernels that reach across. Books per card must not mix.
// Skipped with one card.
#include "check.h"
const size_t N = 4 * MiB;
static int cards() { int n; CHECK(cudaGetDeviceCount(&n)); if (n < 2) skip("one card"); return n; }
static uint32_t *on(int card) { CHECK(cudaSetDevice(card)); return device(N); }
static bool peers(int a, int b) {
    int can; CHECK(cudaDeviceCanAccessPeer(&can, a, b)); printf("peer %d\n", can); if (!can) return false; CHECK(cudaSetDevice(a));
    CHECK(cudaDeviceEnablePeerAccess(b, 0)); SAY(cudaDeviceEnablePeerAccess(b, 0)); cudaGetLastError(); return true;
}

CASE(each_its_own) {
    int n = cards(); std::vector<uint32_t *> p; std::vector<cudaStream_t> s(n); for (int i = 0; i < n; i++) { p.push_back(on(i));
    CHECK(cudaStreamCreate(&s[i])); fill<<<256, 256, 0, s[i]>>>(p[i], N, i); } for (int i = 0; i < n; i++) { CHECK(cudaSetDevice(i));
    CHECK(cudaStreamSynchronize(s[i])); WANT(!wrong_on_device(p[i], N, i)); } for (auto x : p) CHECK(cudaFree(x)); SAY(cudaStreamDestroy(s[0]));
}
CASE(wrong_stream) {
    cards(); auto p = on(0); cudaStream_t s; CHECK(cudaStreamCreate(&s)); CHECK(cudaSetDevice(1)); fill<<<1, 1, 0, s>>>(p, 1, 1); SAY(cudaGetLastError());
    SAY(cudaStreamSynchronize(s)); SAY(cudaMemsetAsync(p, 0, 4, s)); cudaEvent_t e; CHECK(cudaEventCreate(&e)); SAY(cudaEventRecord(e, s)); cudaGetLastError();
}
CASE(copies) {
    cards(); auto p = on(0), q = on(1); CHECK(cudaSetDevice(0)); fill<<<256, 256>>>(p, N, 1); CHECK(cudaMemcpyPeer(q, 1, p, 0, N * 4));
    WANT(!wrong_on_device(q, N, 1)); CHECK(cudaSetDevice(1)); CHECK(cudaMemset(q, 0, N * 4)); CHECK(cudaSetDevice(0)); CHECK(cudaMemcpy(q, p, N * 4, cudaMemcpyDefault)); WANT(!wrong_on_device(q, N, 1));
    CHECK(cudaMemcpyPeerAsync(p, 0, q, 1, N * 4, 0)); CHECK(cudaDeviceSynchronize()); cudaPointerAttributes a; CHECK(cudaPointerGetAttributes(&a, q));
    printf("type %d device %d\n", a.type, a.device);
}
CASE(copies_in_order) {  // a copy between cards waits for the work before it on both, and the work after it waits for the copy
    cards(); const size_t M = 64 * MiB; auto p = device(M); CHECK(cudaSetDevice(1)); auto q = device(M); for (int round = 1; round < 6; round++) {
        CHECK(cudaSetDevice(1)); spin<<<1, 1>>>(30000000); fill<<<256, 256>>>(q, M, round); CHECK(cudaSetDevice(0));
        CHECK(cudaMemcpy(p, q, M * 4, round % 2 ? cudaMemcpyDefault : cudaMemcpyDeviceToDevice)); WANT(!wrong_on_device(p, M, round));
        spin<<<1, 1>>>(30000000); add<<<256, 256>>>(p, M, 7u); CHECK(cudaMemcpy(q, p, M * 4, round % 2 ? cudaMemcpyDeviceToDevice : cudaMemcpyDefault));
        CHECK(cudaSetDevice(1)); add<<<256, 256>>>(q, M, uint32_t(-7)); WANT(!wrong_on_device(q, M, round)); }
}
CASE(stream_of_the_other) {  // an allocation is on the stream's card
    cards(); CHECK(cudaSetDevice(1)); cudaStream_t s; CHECK(cudaStreamCreate(&s)); CHECK(cudaSetDevice(0)); uint32_t *p; CHECK(cudaMallocAsync(&p, N * 4, s));
    cudaPointerAttributes a; CHECK(cudaPointerGetAttributes(&a, p)); printf("type %d device %d\n", a.type, a.device); CHECK(cudaSetDevice(1)); fill<<<256, 256, 0, s>>>(p, N, 1);
    CHECK(cudaStreamSynchronize(s)); WANT(!wrong_on_device(p, N, 1)); CHECK(cudaFreeAsync(p, s)); CHECK(cudaStreamSynchronize(s));
}
CASE(kernels_reach_across) {
    cards(); if (!peers(0, 1)) skip("no peer access"); auto q = on(1); fill<<<256, 256>>>(q, N, 1); CHECK(cudaDeviceSynchronize()); CHECK(cudaSetDevice(0));
    add<<<256, 256>>>(q, N, 0u); auto bad = device<unsigned>(1); CHECK(cudaMemset(bad, 0, 4)); count<<<256, 256>>>(q, N, 1, bad); unsigned w;
    CHECK(cudaMemcpy(&w, bad, 4, cudaMemcpyDeviceToHost)); WANT(!w); SAY(cudaDeviceDisablePeerAccess(1));
}
CASE(without_peer_access) {  // natively an illegal address
    cards(); auto q = on(1); CHECK(cudaSetDevice(0)); fill<<<1, 1>>>(q, 1, 1); SAY(cudaDeviceSynchronize());
}
CASE(attributes) {
    cards(); for (auto a : {cudaDevP2PAttrPerformanceRank, cudaDevP2PAttrAccessSupported, cudaDevP2PAttrNativeAtomicSupported}) { int v;
    CHECK(cudaDeviceGetP2PAttribute(&v, a, 0, 1)); printf("%d\n", v); }
}
CASE(memory_info) {
    cards(); size_t a, b, t; CHECK(cudaSetDevice(1)); CHECK(cudaFree(0)); CHECK(cudaMemGetInfo(&a, &t)); on(0); CHECK(cudaSetDevice(1));
    CHECK(cudaMemGetInfo(&b, &t)); WANT(a == b); auto p = device<char>(512 * MiB); CHECK(cudaMemGetInfo(&b, &t)); WANT(a - b >= 512 * MiB && a - b < 520 * MiB);
    CHECK(cudaSetDevice(0)); CHECK(cudaFree(p)); CHECK(cudaSetDevice(1)); CHECK(cudaMemGetInfo(&b, &t)); WANT(a == b);
}
CASE(managed) {
    cards(); uint32_t *p; CHECK(cudaMallocManaged(&p, N * 4)); fill_host(p, N, 1); for (int i = 0; i < 2; i++) { CHECK(cudaSetDevice(i));
    add<<<256, 256>>>(p, N, 1u); CHECK(cudaDeviceSynchronize()); } for (size_t i = 0; i < N; i++) WANT(p[i] == value(i, 1) + 2);
}
CASE(events_across) {
    cards(); auto p = on(0); cudaStream_t s, t; cudaEvent_t e; CHECK(cudaStreamCreate(&s)); CHECK(cudaEventCreate(&e)); CHECK(cudaSetDevice(1));
    CHECK(cudaStreamCreate(&t)); auto q = device(N); CHECK(cudaSetDevice(0)); spin<<<1, 1, 0, s>>>(20000000); fill<<<256, 256, 0, s>>>(p, N, 3);
    CHECK(cudaEventRecord(e, s)); CHECK(cudaStreamWaitEvent(t, e, 0)); CHECK(cudaMemcpyPeerAsync(q, 1, p, 0, N * 4, t)); CHECK(cudaStreamSynchronize(t));
    WANT(!wrong_on_device(q, N, 3));
}
CASE(pool_access) {
    cards(); cudaMemPool_t m; int can; CHECK(cudaDeviceCanAccessPeer(&can, 1, 0)); if (!can) skip("no peer access"); CHECK(cudaDeviceGetDefaultMemPool(&m, 0));
    cudaMemAccessDesc d{{cudaMemLocationTypeDevice, 1}, cudaMemAccessFlagsProtReadWrite}; CHECK(cudaMemPoolSetAccess(m, &d, 1)); CHECK(cudaSetDevice(0));
    uint32_t *p; CHECK(cudaMallocAsync(&p, N * 4, 0)); CHECK(cudaStreamSynchronize(0)); CHECK(cudaSetDevice(1)); fill<<<256, 256>>>(p, N, 2);
    CHECK(cudaDeviceSynchronize()); WANT(!wrong_on_device(p, N, 2));
}
CASE(a_thread_for_each) {
    int n = cards(); std::vector<std::thread> t;
    for (int i = 0; i < n; i++) t.emplace_back([i] { for (int k = 0; k < 10; k++) { auto p = on(i); fill<<<256, 256>>>(p, N, k); WANT(!wrong_on_device(p, N, k)); CHECK(cudaFree(p)); } });
    for (auto &x : t) x.join();
}
