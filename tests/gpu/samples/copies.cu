// Every direction and shape of copy and fill. An interposer that exchanges device memory for managed memory changes what the
// driver takes a pointer for: directions, cudaMemcpyDefault, pitches, peers and batches have to do as before.
// also ptds: --default-stream per-thread
#include "check.h"
const size_t N = 100003;
__constant__ uint32_t fixed[256];
__device__ uint32_t variable[1024];
__global__ void read_fixed(uint32_t *p) { p[threadIdx.x] = fixed[threadIdx.x]; variable[threadIdx.x] += 1; }

struct Place { const char *name; uint32_t *p; bool host, device; };
static std::vector<Place> places() {
    static uint32_t pageable[N]; uint32_t *pinned, *managed, *mapped, *stream; auto registered = (uint32_t *)aligned_alloc(4096, 512 * KiB);
    CHECK(cudaMallocHost(&pinned, N * 4)); CHECK(cudaMallocManaged(&managed, N * 4));
    CHECK(cudaHostAlloc(&mapped, N * 4, cudaHostAllocMapped | cudaHostAllocPortable)); CHECK(cudaMallocAsync(&stream, N * 4, 0));
    CHECK(cudaHostRegister(registered, 512 * KiB, cudaHostRegisterDefault)); CHECK(cudaDeviceSynchronize());
    return {{"pageable", pageable, true, false}, {"pinned", pinned, true, false}, {"mapped", mapped, true, false}, {"registered", registered, true, false}, {"managed", managed, true, true}, {"device", device(N), false, true}, {"other device memory", device(N), false, true}, {"stream", stream, false, true}};
}
CASE(directions) {  // from everywhere to everywhere, each direction that is right and cudaMemcpyDefault; also a byte off alignment
    auto all = places(); uint32_t seed = 1; std::vector<uint32_t> back(N); auto bytes = [](void *p) { return (char *)p; };
    for (auto &from : all) for (auto &to : all) for (int how = 0; how < 4; how++) {
        if (from.p == to.p) continue;
        cudaMemcpyKind kind = how % 2 ? cudaMemcpyDefault : from.host && !from.device ? (to.host && !to.device ? cudaMemcpyHostToHost : cudaMemcpyHostToDevice) : (to.host && !to.device ? cudaMemcpyDeviceToHost : cudaMemcpyDeviceToDevice);
        auto v = pattern<uint32_t>(N, ++seed); CHECK(cudaMemcpy(from.p, v.data(), N * 4, cudaMemcpyDefault));
        if (to.device) CHECK(cudaMemset(to.p, 0xee, N * 4)); else memset(to.p, 0xee, N * 4); CHECK(cudaDeviceSynchronize());
        if (how < 2) CHECK(cudaMemcpy(to.p, from.p, N * 4, kind));
        else { CHECK(cudaMemcpyAsync(bytes(to.p) + 1, bytes(from.p) + 1, N * 4 - 2, kind, 0)); CHECK(cudaStreamSynchronize(0)); }
        CHECK(cudaMemcpy(back.data(), to.p, N * 4, cudaMemcpyDefault));
        if (how >= 2) { back[0] = back[0] >> 8 << 8 | (v[0] & 255); back[N - 1] = back[N - 1] << 8 >> 8 | (v[N - 1] & 0xff000000); }
        if (back != v) { printf("%s to %s, %s, %d\n", from.name, to.name, kind == cudaMemcpyDefault ? "default" : "explicit", how);
        fail(__LINE__, "back != v", "wrong"); }
    }
}
CASE(wrong_directions) {  // device memory declared to be host memory: the driver looks at the pointer
    auto d = device(N), e = device(N); uint32_t *h; CHECK(cudaMallocHost(&h, N * 4)); fill_host(h, N, 1); static uint32_t pageable[N];
    SAY(cudaMemcpy(d, h, N * 4, cudaMemcpyDeviceToDevice)); SAY(cudaMemcpy(d, h, N * 4, cudaMemcpyDeviceToHost));
    SAY(cudaMemcpy(h, d, N * 4, cudaMemcpyHostToDevice)); SAY(cudaGetLastError());
    SAY(cudaMemcpy(pageable, d, N * 4, cudaMemcpyHostToDevice)); SAY(cudaMemcpy(d, pageable, N * 4, cudaMemcpyDeviceToHost));
    SAY(cudaMemcpy(d, e, N * 4, cudaMemcpyHostToDevice)); SAY(cudaMemcpy(d, e, N * 4, cudaMemcpyDeviceToHost));
    SAY(cudaMemcpy(d, e, N * 4, (cudaMemcpyKind)7)); SAY(cudaGetLastError());
}
CASE(out_of_bounds) {  // past the end of an allocation, of every kind of call
    auto d = device(256); std::vector<uint32_t> h(MiB * 2); SAY(cudaMemcpy(d, h.data(), 1028, cudaMemcpyHostToDevice)); SAY(cudaGetLastError());
    auto big = device(MiB); SAY(cudaMemcpy(h.data(), big, 6 * MiB, cudaMemcpyDeviceToHost)); SAY(cudaMemset(big, 0, 6 * MiB));
    SAY(cudaMemcpy(big + MiB - 1, h.data(), 4, cudaMemcpyHostToDevice)); SAY(cudaGetLastError());
}
CASE(two_dimensions) {
    for (auto [w, h] : {std::pair<size_t, size_t>{1, 1}, {333, 1}, {1, 333}, {1021, 517}, {4096, 64}}) {
        char *p, *q; size_t pp, pq; CHECK(cudaMallocPitch(&p, &pp, w, h)); CHECK(cudaMallocPitch(&q, &pq, w, h)); WANT(pp >= w && pp == pq && pp % 256 == 0);
        printf("pitch %zu\n", pp);
        auto v = pattern<char>(w * h, 5), back = v; for (auto &c : back) c = 0;
        CHECK(cudaMemcpy2D(p, pp, v.data(), w, w, h, cudaMemcpyHostToDevice)); CHECK(cudaMemcpy2DAsync(q, pq, p, pp, w, h, cudaMemcpyDeviceToDevice, 0));
        CHECK(cudaMemcpy2D(back.data(), w, q, pq, w, h, cudaMemcpyDefault)); WANT(back == v);
        CHECK(cudaMemset2D(q, pq, 7, w, h)); CHECK(cudaMemset2DAsync(q, pq, 9, (w + 1) / 2, h, 0));
        CHECK(cudaMemcpy2D(back.data(), w, q, pq, w, h, cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < w * h; i++) WANT(back[i] == (i % w < (w + 1) / 2 ? 9 : 7));
        SAY(cudaMemcpy2D(p, w - 1, v.data(), w, w, h, cudaMemcpyHostToDevice)); cudaGetLastError(); CHECK(cudaFree(p)); CHECK(cudaFree(q));
    }
}
CASE(three_dimensions) {
    for (cudaExtent e : {make_cudaExtent(1, 1, 1), make_cudaExtent(99, 1, 7), make_cudaExtent(257, 33, 9)}) {
        cudaPitchedPtr p, q; CHECK(cudaMalloc3D(&p, e)); CHECK(cudaMalloc3D(&q, e)); printf("pitch %zu x %zu y %zu\n", p.pitch, p.xsize, p.ysize);
        size_t n = e.width * e.height * e.depth;
        auto v = pattern<char>(n, 8); std::vector<char> back(n); cudaMemcpy3DParms c{}; c.srcPtr = make_cudaPitchedPtr(v.data(), e.width, e.width, e.height);
        c.dstPtr = p; c.extent = e; c.kind = cudaMemcpyHostToDevice; CHECK(cudaMemcpy3D(&c));
        c.srcPtr = p; c.dstPtr = q; c.kind = cudaMemcpyDeviceToDevice; CHECK(cudaMemcpy3DAsync(&c, 0)); c.srcPtr = q;
        c.dstPtr = make_cudaPitchedPtr(back.data(), e.width, e.width, e.height); c.kind = cudaMemcpyDefault; CHECK(cudaMemcpy3D(&c)); WANT(back == v);
        CHECK(cudaMemset3D(q, 3, e)); CHECK(cudaMemset3DAsync(q, 4, make_cudaExtent(1, e.height, e.depth), 0)); CHECK(cudaMemcpy3D(&c));
        for (size_t i = 0; i < n; i++) WANT(back[i] == (i % e.width ? 3 : 4));
        cudaMemcpy3DPeerParms peer{}; peer.srcPtr = p; peer.dstPtr = q; peer.extent = e; CHECK(cudaMemcpy3DPeer(&peer)); CHECK(cudaMemcpy3D(&c));
        WANT(back == v); CHECK(cudaFree(p.ptr)); CHECK(cudaFree(q.ptr));
    }
}
CASE(fills) {  // of every width, off alignment, and in the order of the stream
    auto p = device<uint8_t>(MiB); std::vector<uint8_t> v(MiB); auto d = CUdeviceptr(p); CHECK(cudaMemset(p, 0, MiB)); CHECK(cuMemsetD8(d + 3, 1, 777));
    CHECK(cuMemsetD16(d + 1000, 0x0202, 100)); CHECK(cuMemsetD32(d + 2000, 0x03030303, 50)); CHECK(cuMemsetD2D8(d + 4096, 512, 4, 5, 100));
    CHECK(cuMemsetD2D16(d + 4106, 512, 0x0505, 5, 100)); CHECK(cuMemsetD2D32(d + 4120, 512, 0x06060606, 5, 100));
    CHECK(cudaMemcpy(v.data(), p, MiB, cudaMemcpyDeviceToHost)); size_t sum = 0; for (auto x : v) sum += x;
    WANT(sum == 777 + 400 + 600 + 100 * (20 + 50 + 120));
    SAY(cuMemsetD16(d + 1, 0, 2)); SAY(cuMemsetD32(d + 2, 0, 2)); SAY(cuMemsetD8(d, 0, 0)); SAY(cudaMemset(p, 1, 0)); SAY(cudaMemset(nullptr, 1, 4));
    SAY(cudaMemset(nullptr, 1, 0)); cudaGetLastError();
    for (int i = 1; i < 100; i++) { CHECK(cudaMemsetAsync(p, i, MiB, 0)); add<<<64, 256>>>(p, MiB, uint8_t(1)); }
    CHECK(cudaMemcpy(v.data(), p, MiB, cudaMemcpyDeviceToHost)); for (auto x : v) WANT(x == 100);
}
CASE(same_device_peer) {
    auto p = device(N), q = device(N); fill<<<64, 256>>>(p, N, 4); CHECK(cudaMemcpyPeer(q, 0, p, 0, N * 4)); WANT(!wrong_on_device(q, N, 4));
    CHECK(cudaMemset(q, 0, N * 4)); CHECK(cudaMemcpyPeerAsync(q, 0, p, 0, N * 4, 0)); WANT(!wrong_on_device(q, N, 4));
    SAY(cudaMemcpyPeer(q, 99, p, 0, 4)); cudaGetLastError();
}
CASE(overlap) {  // as simpleMultiCopy: three streams, in, kernel, out
    const size_t n = MiB; uint32_t *in, *out; cudaStream_t s[3]; cudaEvent_t done[3]; uint32_t *d[3]; CHECK(cudaMallocHost(&in, 12 * n * 4));
    CHECK(cudaHostAlloc(&out, 12 * n * 4, 0)); fill_host(in, 12 * n, 6);
    for (int i = 0; i < 3; i++) { CHECK(cudaStreamCreateWithFlags(&s[i], cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&done[i], cudaEventDisableTiming)); d[i] = device(n); }
    for (int i = 0; i < 12; i++) {
        int k = i % 3; CHECK(cudaEventSynchronize(done[k])); CHECK(cudaMemcpyAsync(d[k], in + i * n, n * 4, cudaMemcpyHostToDevice, s[k]));
        add<<<256, 256, 0, s[k]>>>(d[k], n, 5u); CHECK(cudaMemcpyAsync(out + i * n, d[k], n * 4, cudaMemcpyDeviceToHost, s[k]));
        CHECK(cudaEventRecord(done[k], s[k]));
    }
    CHECK(cudaDeviceSynchronize()); for (size_t i = 0; i < 12 * n; i++) WANT(out[i] == in[i] + 5);
}
CASE(batches) {
    auto p = device(N), q = device(N); std::vector<uint32_t> v = pattern<uint32_t>(N, 1), w(N); cudaStream_t s; CHECK(cudaStreamCreate(&s));
    const void *from[] = {v.data(), p}; void *to[] = {p, q}; size_t sizes[] = {N * 4, N * 4}, first[] = {0}; cudaMemcpyAttributes a{};
    a.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    CHECK(cudaMemcpyBatchAsync(to, from, sizes, 1, &a, first, 1, s)); CHECK(cudaMemcpyBatchAsync(to + 1, from + 1, sizes, 1, &a, first, 1, s));
    CHECK(cudaStreamSynchronize(s)); WANT(!wrong_on_device(q, N, 1));
    cudaMemcpy3DBatchOp op{}; op.src.type = op.dst.type = cudaMemcpyOperandTypePointer; op.src.op.ptr.ptr = q; op.dst.op.ptr.ptr = p;
    op.src.op.ptr.rowLength = op.dst.op.ptr.rowLength = N; op.src.op.ptr.layerHeight = op.dst.op.ptr.layerHeight = 1;
    op.src.op.ptr.locHint = op.dst.op.ptr.locHint = {cudaMemLocationTypeDevice, 0}; op.extent = make_cudaExtent(N * 4, 1, 1);
    op.srcAccessOrder = cudaMemcpySrcAccessOrderStream; op.src.op.ptr.rowLength = op.dst.op.ptr.rowLength = N * 4;
    fill<<<64, 256, 0, s>>>(q, N, 2); CHECK(cudaMemcpy3DBatchAsync(1, &op, 0, s)); CHECK(cudaStreamSynchronize(s)); WANT(!wrong_on_device(p, N, 2));
    SAY(cudaMemcpyBatchAsync(to, from, sizes, 0, &a, first, 1, s)); SAY(cudaMemcpyBatchAsync(to, from, sizes, 2, &a, first, 1, 0)); cudaGetLastError();
}
CASE(symbols) {
    auto v = pattern<uint32_t>(1024, 1); std::vector<uint32_t> w(1024); void *at; size_t size; CHECK(cudaMemcpyToSymbol(fixed, v.data(), 1024));
    CHECK(cudaMemcpyToSymbol(variable, v.data(), 4096)); CHECK(cudaGetSymbolAddress(&at, variable)); CHECK(cudaGetSymbolSize(&size, variable));
    WANT(size == 4096);
    auto p = device(256); read_fixed<<<1, 256>>>(p); WANT(!wrong_on_device(p, 256, 1));
    CHECK(cudaMemcpyFromSymbolAsync(w.data(), variable, 4096, 0, cudaMemcpyDeviceToHost, 0)); CHECK(cudaStreamSynchronize(0));
    for (int i = 0; i < 1024; i++) WANT(w[i] == v[i] + (i < 256));
    CHECK(cudaMemcpyToSymbol(fixed, p, 512, 512, cudaMemcpyDeviceToDevice)); read_fixed<<<1, 256>>>(p);
    CHECK(cudaMemcpy(w.data(), p, 1024, cudaMemcpyDeviceToHost)); for (int i = 0; i < 256; i++) WANT(w[i] == v[i % 128]);
    CHECK(cudaMemcpy(at, p, 1024, cudaMemcpyDefault)); CHECK(cudaMemset(at, 0, 4)); WANT(!wrong_on_device((uint32_t *)at + 1, 0, 1));
    SAY(cudaMemcpyToSymbol(fixed, v.data(), 1028)); SAY(cudaMemcpyToSymbol((const void *)nullptr, v.data(), 4)); cudaGetLastError();
}
CASE(driver_shapes) {  // cuMemcpy2D with odd offsets, unaligned too, and the plain driver calls
    auto p = CUdeviceptr(device<char>(MiB)), q = CUdeviceptr(device<char>(MiB)); auto v = pattern<char>(MiB, 3); std::vector<char> w(MiB);
    CHECK(cuMemcpyHtoD(p, v.data(), MiB)); CHECK(cuMemcpyDtoD(q, p, MiB)); CHECK(cuMemcpyDtoH(w.data(), q, MiB)); WANT(w == v);
    CHECK(cuMemcpy(p + 5, q + 3, 1000));
    CUDA_MEMCPY2D c{}; c.srcMemoryType = CU_MEMORYTYPE_DEVICE; c.srcDevice = q; c.srcPitch = 1000; c.srcXInBytes = 13; c.srcY = 7;
    c.dstMemoryType = CU_MEMORYTYPE_HOST; c.dstHost = w.data(); c.dstPitch = 321; c.dstXInBytes = 1; c.WidthInBytes = 300; c.Height = 99;
    CHECK(cuMemcpy2DUnaligned(&c)); for (int y = 0; y < 99; y++) for (int x = 0; x < 300; x++) WANT(w[y * 321 + x + 1] == v[(y + 7) * 1000 + x + 13]);
    c.dstMemoryType = CU_MEMORYTYPE_UNIFIED; c.dstDevice = p; c.srcMemoryType = CU_MEMORYTYPE_UNIFIED; CHECK(cuMemcpy2D(&c));
    CHECK(cuMemcpyDtoH(w.data(), p, MiB)); for (int y = 0; y < 99; y++) for (int x = 0; x < 300; x++) WANT(w[y * 321 + x + 1] == v[(y + 7) * 1000 + x + 13]);
}
CASE(pageable_reuse) {  // an asynchronous copy from pageable memory has read it when it returns
    const size_t n = 4 * MiB; auto p = device(n); auto v = pattern<uint32_t>(n, 1); spin<<<1, 1>>>(20000000);
    CHECK(cudaMemcpyAsync(p, v.data(), n * 4, cudaMemcpyHostToDevice, 0)); fill_host(v.data(), n, 2); WANT(!wrong_on_device(p, n, 1));
    for (size_t k : {4, 64, 1000, 16384}) { spin<<<1, 1>>>(5000000); fill_host(v.data(), k, 3);
    CHECK(cudaMemcpyAsync(p, v.data(), k * 4, cudaMemcpyHostToDevice, 0)); fill_host(v.data(), k, 4); WANT(!wrong_on_device(p, k, 3)); }
}
