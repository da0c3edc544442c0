// Peers: what two cards answer about each other, kernels and copies across, memory that comes before and after access is given,
// access that is taken away, and rounds in which each card works on the other's memory, with every word checked.
// Skipped with one card, or where cards do not reach each other. `rounds SECONDS MIB` goes on for so long.
#include "check.h"
#include <chrono>
#include <deque>
static int cards(int least = 2) {
    int n; CHECK(cudaGetDeviceCount(&n)); if (n < least) skip(least > 2 ? "two cards" : "one card");
    for (int a = 0; a < least; a++) for (int b = 0; b < least; b++) { int can; if (a == b) continue;
        CHECK(cudaDeviceCanAccessPeer(&can, a, b)); if (!can) skip("no peer access"); }
    return n;
}
static void use(int card) { CHECK(cudaSetDevice(card)); }
static uint32_t *on(int card, size_t n) { use(card); return device(n); }
static void open(int from, int to) { use(from); CHECK(cudaDeviceEnablePeerAccess(to, 0)); }
static void shut(int from, int to) { use(from); CHECK(cudaDeviceDisablePeerAccess(to)); }
static void done(int card) { use(card); CHECK(cudaDeviceSynchronize()); }
__global__ void count_sum(const uint32_t *p, size_t n, uint32_t seed, uint32_t more, unsigned *wrong) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
        if (p[i] != value(i, seed) + more) atomicAdd(wrong, 1);
}
__global__ void add_atomic(uint32_t *p, size_t n, int times) {
    for (int k = 0; k < times; k++) atomicAdd_system(p + (blockIdx.x * blockDim.x + threadIdx.x + k) % n, 1u);
}
static unsigned bad_seen_from(int card, const uint32_t *p, size_t n, uint32_t seed, uint32_t more = 0) {  // every word, by a kernel of `card`
    use(card); unsigned *bad = device<unsigned>(1), w; CHECK(cudaMemset(bad, 0, 4)); count_sum<<<512, 256>>>(p, n, seed, more, bad);
    CHECK(cudaMemcpy(&w, bad, 4, cudaMemcpyDeviceToHost)); CHECK(cudaFree(bad)); return w;
}
static CUcontext context(int card) { use(card); CHECK(cudaFree(0)); CUcontext c; CHECK(cuCtxGetCurrent(&c)); return c; }

CASE(answers) {
    int n = cards(); n = n < 3 ? n : 3;
    for (int a = 0; a < n; a++) for (int b = -1; b <= n; b++) {
        int can = -1; auto said_can = cuDeviceCanAccessPeer(&can, a, b < n ? b : 99); printf("%d to %d: %s %d,", a, b, said(said_can), can);
        for (int what = 0; what < 8; what++) { int v = -1; auto r = cuDeviceGetP2PAttribute(&v, CUdevice_P2PAttribute(what), a, b < n ? b : 99);
            printf(" %d:%d", int(r), r ? 0 : v); }
        puts("");
    }
    auto mine = context(1), other = context(0); use(1); SAY(cuCtxDisablePeerAccess(other)); SAY(cuCtxEnablePeerAccess(other, 1)); SAY(cuCtxEnablePeerAccess(mine, 0));
    SAY(cuCtxEnablePeerAccess(other, 0)); SAY(cuCtxEnablePeerAccess(other, 0)); SAY(cuCtxDisablePeerAccess(other)); SAY(cuCtxDisablePeerAccess(other));
    SAY(cudaDeviceEnablePeerAccess(1, 0)); SAY(cudaDeviceEnablePeerAccess(99, 0)); cudaGetLastError();
}
CASE(before_and_after) {  // large memory and small, of before and after the access
    cards(); const size_t sizes[] = {24 * MiB + 5, 1024, 25, MiB / 4, 100 * MiB + 77}; std::vector<uint32_t *> all;
    for (auto n : sizes) all.push_back(on(1, n));
    open(0, 1); for (auto n : sizes) all.push_back(on(1, n));
    use(0); for (size_t k = 0; k < 10; k++) fill<<<256, 256>>>(all[k], sizes[k % 5], uint32_t(k)); done(0);
    for (size_t k = 0; k < 10; k++) { WANT(!bad_seen_from(1, all[k], sizes[k % 5], uint32_t(k))); WANT(!bad_seen_from(0, all[k], sizes[k % 5], uint32_t(k))); }
    for (size_t k = 0; k < 10; k += 2) { use(1); CHECK(cudaFree(all[k])); all[k] = on(1, sizes[k % 5]); use(0); fill<<<256, 256>>>(all[k], sizes[k % 5], 90u); done(0);
        WANT(!bad_seen_from(1, all[k], sizes[k % 5], 90)); }
}
CASE(both_ways) {
    cards(); const size_t n = 40 * MiB; open(0, 1); open(1, 0); auto p = on(0, n), q = on(1, n); use(1); fill<<<256, 256>>>(p, n, 1); use(0); fill<<<256, 256>>>(q, n, 2);
    done(1); done(0); WANT(!bad_seen_from(0, p, n, 1)); WANT(!bad_seen_from(1, q, n, 2)); WANT(!bad_seen_from(1, p, n, 1)); WANT(!bad_seen_from(0, q, n, 2));
}
CASE(atomics) {  // both cards add to the same words
    cards(); const size_t n = 1024; open(0, 1); auto q = on(1, n); CHECK(cudaMemset(q, 0, n * 4)); done(1); int native;
    CHECK(cudaDeviceGetP2PAttribute(&native, cudaDevP2PAttrNativeAtomicSupported, 0, 1)); if (!native) skip("no atomics across");
    for (int card : {0, 1}) { use(card); add_atomic<<<64, 256>>>(q, n, 100); }
    done(0); done(1); std::vector<uint32_t> x(n); CHECK(cudaMemcpy(x.data(), q, n * 4, cudaMemcpyDefault)); for (auto w : x) WANT(w == 2 * 64 * 256 * 100 / n);
}
CASE(in_the_middle) {  // access is taken away and given back; copies need none
    cards(); const size_t n = 30 * MiB; auto p = on(0, n), q = on(1, n); open(0, 1);
    for (uint32_t round = 0; round < 6; round++) {
        use(0); fill<<<256, 256>>>(q, n, round); done(0); shut(0, 1); SAY(cudaDeviceDisablePeerAccess(1)); cudaGetLastError();
        CHECK(cudaMemcpyPeer(p, 0, q, 1, n * 4)); WANT(!bad_seen_from(0, p, n, round)); WANT(!bad_seen_from(1, q, n, round));
        auto later = on(1, n); open(0, 1); fill<<<256, 256>>>(later, n, round + 50); done(0); WANT(!bad_seen_from(1, later, n, round + 50));
        use(1); CHECK(cudaFree(later));
    }
}
CASE(after_the_end) {  // natively an illegal address
    cards(); auto q = on(1, MiB); open(0, 1); fill<<<1, 1>>>(q, 1, 1); done(0); shut(0, 1); fill<<<1, 1>>>(q, 1, 1); SAY(cudaDeviceSynchronize());
}
CASE(copies) {  // every kind of copy between contexts, at odd places, over the borders of whatever the memory consists of
    cards(); const size_t n = 150 * MiB; auto a = context(0), b = context(1); auto p = on(0, n / 4), q = on(1, n / 4); use(0); fill<<<256, 256>>>(p, n / 4, 1); done(0);
    auto P = CUdeviceptr(p), Q = CUdeviceptr(q); cudaStream_t s; CHECK(cudaStreamCreate(&s)); CHECK(cuMemcpyPeer(Q, b, P, a, n)); WANT(!bad_seen_from(1, q, n / 4, 1));
    const size_t odd[][2] = {{0, 1}, {4095, 8194}, {2 * MiB - 3, 7}, {32 * MiB - 1, 2}, {31 * MiB + 1, 66 * MiB + 5}, {n - 3, 3}};
    for (auto &o : odd) for (int asynchronous : {0, 1}) {
        use(1); CHECK(cudaMemset(q, 0, n)); done(1); use(0);
        if (asynchronous) { CHECK(cuMemcpyPeerAsync(Q + o[0], b, P + o[0], a, o[1], s)); CHECK(cudaStreamSynchronize(s)); } else CHECK(cuMemcpyPeer(Q + o[0], b, P + o[0], a, o[1]));
        std::vector<char> x(o[1]), y(o[1]); CHECK(cudaMemcpy(x.data(), (char *)p + o[0], o[1], cudaMemcpyDefault)); CHECK(cudaMemcpy(y.data(), (char *)q + o[0], o[1], cudaMemcpyDefault));
        WANT(x == y); char edge[2] = {}; if (o[0]) CHECK(cudaMemcpy(edge, (char *)q + o[0] - 1, 1, cudaMemcpyDefault));
        if (o[0] + o[1] < n) CHECK(cudaMemcpy(edge + 1, (char *)q + o[0] + o[1], 1, cudaMemcpyDefault)); WANT(!edge[0] && !edge[1]);
    }
    CUDA_MEMCPY3D_PEER c{}; c.srcMemoryType = c.dstMemoryType = CU_MEMORYTYPE_DEVICE; c.srcDevice = P; c.dstDevice = Q; c.srcContext = a; c.dstContext = b;
    c.srcPitch = c.dstPitch = 4096; c.srcHeight = c.dstHeight = 1024; c.WidthInBytes = 4000; c.Height = 1000; c.Depth = n / (4096 * 1024); c.srcXInBytes = c.dstXInBytes = 8;
    use(1); CHECK(cudaMemset(q, 0, n)); done(1); use(0); CHECK(cuMemcpy3DPeer(&c)); CHECK(cuMemcpy3DPeerAsync(&c, s)); CHECK(cudaStreamSynchronize(s));
    auto x = std::vector<uint32_t>(n / 4); CHECK(cudaMemcpy(x.data(), q, n, cudaMemcpyDefault));
    for (size_t i = 0; i < n / 4; i++) { size_t at = i * 4 % 4096, line = i * 4 / 4096 % 1024, slice = i * 4 / (4096 * 1024);
        WANT(x[i] == (at >= 8 && at < 4008 && line < 1000 && slice < c.Depth ? value(i, 1) : 0)); }
    SAY(cuMemcpyPeer(Q, b, P, a, 0)); SAY(cuMemcpyPeer(Q, nullptr, P, a, 4)); SAY(cuMemcpyPeer(0, b, P, a, 4)); SAY(cuMemcpyPeer(Q, a, P, b, 4)); SAY(cuMemcpyPeer(P, a, P + 8, a, 4));
}
CASE(current_elsewhere) {  // without peer access: calls on one card, or on its streams, that name the other card's memory
    cards(); const size_t n = 9 * MiB; auto p = on(0, n), q = on(1, n), r = on(1, n); use(1); fill<<<256, 256>>>(q, n, 1); done(1); use(0); cudaStream_t s, t; CHECK(cudaStreamCreate(&s));
    CHECK(cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking)); auto h = pattern<uint32_t>(n, 2); std::vector<uint32_t> x(n); uint32_t *pinned; CHECK(cudaMallocHost(&pinned, n * 4));
    auto tell = [&](const char *what, cudaError_t first) { auto second = cudaDeviceSynchronize(); printf("%s: %s %s\n", what, said(first), said(second)); };
    auto look = [&](uint32_t *at, uint32_t seed) { use(at == p ? 0 : 1); printf("  wrong %d\n", wrong_on_device(at, n, seed) != 0); use(0); };
    tell("filled", cudaMemset(r, 0, n * 4)); tell("filled in a stream", cudaMemsetAsync(r, 0, n * 4, s)); cudaGetLastError();
    tell("to the host", cudaMemcpy(x.data(), q, n * 4, cudaMemcpyDeviceToHost)); printf("  wrong %d\n", wrong(x.data(), n, 1) != 0);
    tell("to pinned memory", cudaMemcpyAsync(pinned, q, n * 4, cudaMemcpyDeviceToHost, s)); printf("  wrong %d\n", wrong(pinned, n, 1) != 0);
    tell("from the host", cudaMemcpy(r, h.data(), n * 4, cudaMemcpyHostToDevice)); look(r, 2); fill_host(pinned, n, 3);
    tell("from pinned memory", cudaMemcpyAsync(r, pinned, n * 4, cudaMemcpyDefault, t)); look(r, 3);
    tell("here", cudaMemcpy(p, q, n * 4, cudaMemcpyDefault)); look(p, 1); CHECK(cudaMemset(p, 0, n * 4));
    tell("here, in a stream", cudaMemcpyAsync(p, q, n * 4, cudaMemcpyDeviceToDevice, s)); look(p, 1); fill<<<256, 256>>>(p, n, 4); CHECK(cudaDeviceSynchronize());
    tell("there", cudaMemcpy(r, p, n * 4, cudaMemcpyDeviceToDevice)); look(r, 4); fill<<<256, 256, 0, t>>>(p, n, 5);
    tell("there, in a stream", cudaMemcpyAsync(r, p, n * 4, cudaMemcpyDefault, t)); look(r, 5);
    tell("there and there", cudaMemcpyAsync(r, q, n * 4, cudaMemcpyDefault, t)); look(r, 1); CHECK(cudaMemset(p, 0, n * 4));
    tell("lines", cudaMemcpy2DAsync(p, 4096, q, 4096, 4096, n / 1024, cudaMemcpyDefault, s)); look(p, 1);
    tell("lines to the host", cudaMemcpy2D(x.data(), 4096, r, 4096, 4096, n / 1024, cudaMemcpyDeviceToHost)); printf("  wrong %d\n", wrong(x.data(), n, 1) != 0);
    cudaGraph_t g; cudaGraphExec_t e; fill<<<256, 256>>>(p, n, 6); CHECK(cudaDeviceSynchronize());
    CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal)); auto caught = cudaMemcpyAsync(r, p, n * 4, cudaMemcpyDefault, s); auto ended = cudaStreamEndCapture(s, &g);
    printf("captured: %s %s\n", said(caught), said(ended)); if (!caught && !ended) { tell("made", cudaGraphInstantiate(&e, g, 0)); tell("in a graph", cudaGraphLaunch(e, s)); look(r, 6); }
}
CASE(mapped) {  // access of each card for itself, by cuMemSetAccess
    cards(); context(0); context(1); CUmemAllocationProp prop{}; prop.type = CU_MEM_ALLOCATION_TYPE_PINNED; prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, 1}; size_t g;
    CHECK(cuMemGetAllocationGranularity(&g, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM)); CUdeviceptr at; CHECK(cuMemAddressReserve(&at, 8 * g, 0, 0, 0)); auto p = (uint32_t *)at; const size_t n = g / 4;
    auto tell = [&] { for (int card : {0, 1}) for (int k : {0, 4, 7}) { CUmemLocation l{CU_MEM_LOCATION_TYPE_DEVICE, card}; unsigned long long f; auto r = cuMemGetAccess(&f, &l, at + k * g);
        printf("card %d part %d: %s %llu\n", card, k, said(r), r ? 0 : f); } };
    for (int k = 0; k < 8; k++) { CUmemGenericAllocationHandle h; CHECK(cuMemCreate(&h, g, &prop, 0)); CHECK(cuMemMap(at + k * g, g, 0, h, 0)); CHECK(cuMemRelease(h)); }
    CUmemAccessDesc d[] = {{{CU_MEM_LOCATION_TYPE_DEVICE, 1}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE}, {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE}};
    CHECK(cuMemSetAccess(at, 8 * g, d, 1)); tell(); CHECK(cuMemSetAccess(at, 4 * g, d + 1, 1)); tell(); use(0); fill<<<64, 256>>>(p, 4 * n, 1); done(0); WANT(!bad_seen_from(1, p, 4 * n, 1));
    CHECK(cuMemSetAccess(at, 8 * g, d, 2)); tell(); use(0); fill<<<64, 256>>>(p, 8 * n, 2); done(0); WANT(!bad_seen_from(1, p, 8 * n, 2));
    d[1].flags = CU_MEM_ACCESS_FLAGS_PROT_NONE; CHECK(cuMemSetAccess(at + 4 * g, 4 * g, d + 1, 1)); tell(); WANT(!bad_seen_from(0, p, 4 * n, 2)); WANT(!bad_seen_from(1, p, 8 * n, 2));
    CHECK(cuMemUnmap(at, 8 * g)); CHECK(cuMemAddressFree(at, 8 * g));
}
CASE(contexts) {  // access belongs to a pair of contexts, and ends with either
    cards(); const size_t n = 20 * MiB; auto q = on(1, n); auto other = context(1); CUcontext one, two; CHECK(cuCtxCreate(&one, nullptr, 0, 0)); CHECK(cuCtxEnablePeerAccess(other, 0));
    CHECK(cuCtxCreate(&two, nullptr, 0, 0)); CHECK(cuCtxEnablePeerAccess(other, 0)); fill<<<64, 256>>>(q, n, 1); CHECK(cuCtxSynchronize()); CHECK(cuCtxDestroy(two));
    CHECK(cuCtxSetCurrent(one)); SAY(cuCtxEnablePeerAccess(other, 0)); CHECK(cuCtxSynchronize()); CHECK(cuCtxSetCurrent(one)); fill<<<64, 256>>>(q, n, 2); CHECK(cuCtxSynchronize());
    WANT(!bad_seen_from(1, q, n, 2)); CHECK(cuCtxDestroy(one)); WANT(!bad_seen_from(1, q, n, 2)); open(0, 1); fill<<<64, 256>>>(q, n, 3); done(0); WANT(!bad_seen_from(1, q, n, 3));
}
CASE(three) {  // 0 reaches 1, and 1 reaches 2; what goes round comes back
    cards(3); const size_t n = 24 * MiB; uint32_t *p[3]; open(0, 1); open(1, 2); for (int i = 0; i < 3; i++) p[i] = on(i, n); use(0); fill<<<256, 256>>>(p[1], n, 1); done(0);
    CHECK(cudaMemcpyPeer(p[2], 2, p[1], 1, n * 4)); use(1); add<<<256, 256>>>(p[2], n, 5u); done(1); CHECK(cudaMemcpyPeer(p[0], 0, p[2], 2, n * 4)); WANT(!bad_seen_from(0, p[0], n, 1, 5));
    open(2, 0); WANT(!bad_seen_from(2, p[0], n, 1, 5)); shut(0, 1); WANT(!bad_seen_from(1, p[2], n, 1, 5)); WANT(!bad_seen_from(2, p[0], n, 1, 5));
}
CASE(rounds) {  // each card adds to the other's memory, in order of events; memory comes and goes, access too, a graph reaches across
    cards(); const double seconds = args.size() > 0 ? atof(args[0].c_str()) : 0.5; const size_t n = (args.size() > 1 ? atoi(args[1].c_str()) : 64) * MiB / 4, m = n / 4 + 3;
    open(0, 1); open(1, 0); auto p = on(0, n), r = on(0, m); cudaStream_t s[2]; cudaEvent_t e[2]; auto q = on(1, n);
    for (int i : {0, 1}) { use(i); CHECK(cudaStreamCreateWithFlags(&s[i], i ? cudaStreamNonBlocking : 0)); CHECK(cudaEventCreate(&e[i])); }
    use(0); fill<<<256, 256>>>(p, n, 1); fill<<<256, 256>>>(q, n, 2); done(0);
    std::deque<std::pair<uint32_t *, size_t>> later; uint32_t a = 0, b = 0; int round = 0; const auto begin = std::chrono::steady_clock::now();
    while (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() < seconds) {
        const uint32_t k = ++round; use(0); add<<<256, 256, 0, s[0]>>>(q, n, k); b += k; CHECK(cudaEventRecord(e[0], s[0])); use(1); CHECK(cudaStreamWaitEvent(s[1], e[0], 0));
        add<<<256, 256, 0, s[1]>>>(q, n, 3u); b += 3; add<<<256, 256, 0, s[1]>>>(p, n, 2 * k); a += 2 * k; CHECK(cudaEventRecord(e[1], s[1])); use(0); CHECK(cudaStreamWaitEvent(s[0], e[1], 0));
        if (k % 3 == 0) {  // a graph does not outlive the access that it was made with
            cudaGraph_t g; cudaGraphExec_t x; CHECK(cudaStreamBeginCapture(s[0], cudaStreamCaptureModeThreadLocal)); add<<<256, 256, 0, s[0]>>>(q, n, 11u); CHECK(cudaMemcpyAsync(r, q, m * 4, cudaMemcpyDefault, s[0]));
            CHECK(cudaStreamEndCapture(s[0], &g)); CHECK(cudaGraphInstantiate(&x, g, 0)); CHECK(cudaGraphLaunch(x, s[0])); b += 11; CHECK(cudaStreamSynchronize(s[0]));
            CHECK(cudaGraphExecDestroy(x)); CHECK(cudaGraphDestroy(g)); WANT(!bad_seen_from(1, r, m, 2, b));
        }
        CHECK(cudaStreamSynchronize(s[0])); WANT(!bad_seen_from(int(k % 2), p, n, 1, a)); WANT(!bad_seen_from(int(k / 2 % 2), q, n, 2, b));
        const size_t l = (k * 37 % 60 + 1) * MiB / 4 + k; later.push_back({on(1, l), l}); use(0); fill<<<256, 256>>>(later.back().first, l, k); done(0);
        for (size_t i = 0; i < later.size(); i++) WANT(!bad_seen_from(int(i % 2), later[i].first, later[i].second, k - uint32_t(later.size() - 1 - i)));
        if (later.size() > 3) { use(1); CHECK(cudaFree(later.front().first)); later.pop_front(); }
        if (k % 4 == 0) { shut(0, 1); WANT(!bad_seen_from(1, q, n, 2, b)); CHECK(cudaMemcpyPeer(r, 0, q, 1, m * 4)); WANT(!bad_seen_from(0, r, m, 2, b)); open(0, 1); }
        if (k % 5 == 0) { shut(1, 0); WANT(!bad_seen_from(0, p, n, 1, a)); open(1, 0); }
        usleep(2000);
    }
    for (int i : {0, 1}) { WANT(!bad_seen_from(i, p, n, 1, a)); WANT(!bad_seen_from(i, q, n, 2, b)); }
    if (!args.empty()) printf("{\"rounds\": %d}\n", round);
}
