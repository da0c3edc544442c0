// Streams and events: what waits for what, callbacks, memory operations of streams. An interposer's added calls must order nothing
// anew and wait for nothing; a fill or an allocation that waits where the driver's own does not is seen here.
// also ptds: --default-stream per-thread
#include "check.h"
#include <atomic>
const size_t N = MiB;
static cudaStream_t stream(unsigned flags = cudaStreamNonBlocking) { cudaStream_t s; CHECK(cudaStreamCreateWithFlags(&s, flags)); return s; }
static volatile int *flag() { int *f; CHECK(cudaHostAlloc(&f, 64, cudaHostAllocMapped)); memset(f, 0, 64); return f; }
static const char *state(cudaStream_t s) { return cudaStreamQuery(s) == cudaSuccess ? "done" : "busy"; }
static uint32_t *zeros(size_t n = N) { auto p = device(n); CHECK(cudaMemset(p, 0, n * 4)); CHECK(cudaDeviceSynchronize()); return p; }
static void warm() {  // modules are loaded, so nothing else waits
    auto f = flag(); *f = 1; spin<<<1, 1>>>(1); await<<<1, 1>>>(f); auto p = zeros(); fill<<<1, 1>>>(p, 1, 0); add<<<1, 1>>>(p, 1, 1u);
    CHECK(cudaDeviceSynchronize()); CHECK(cudaFree(p));
}

CASE(legacy_order) {  // a blocking stream waits for the legacy stream and the reverse; a non-blocking one and a thread's own do not wait alike
    warm(); auto b = stream(cudaStreamDefault), n = stream(); auto f = flag(); await<<<1, 1, 0, cudaStreamLegacy>>>(f); spin<<<1, 1, 0, b>>>(1000);
    spin<<<1, 1, 0, n>>>(1000); CHECK(cudaStreamSynchronize(n)); usleep(20000);
    printf("blocking %s non-blocking %s legacy %s\n", state(b), state(n), state(cudaStreamLegacy)); *f = 1; CHECK(cudaStreamSynchronize(b)); *f = 0;
    await<<<1, 1, 0, b>>>(f); spin<<<1, 1, 0, cudaStreamLegacy>>>(1000); spin<<<1, 1, 0, cudaStreamPerThread>>>(1000); usleep(20000);
    printf("legacy %s per-thread %s\n", state(cudaStreamLegacy), state(cudaStreamPerThread)); *f = 1; CHECK(cudaDeviceSynchronize());
}
CASE(fills_do_not_wait) {  // cudaMemset returns while a kernel before it runs; a copy to pageable memory waits
    warm(); auto small = zeros(16), p = zeros(); auto f = flag(); await<<<1, 1>>>(f); CHECK(cudaMemset(p, 1, N * 4)); printf("after memset %s\n", state(0));
    CHECK(cudaMemset(small, 1, 64)); printf("after small memset %s\n", state(0)); CHECK(cudaMemset2D(p, 1024, 2, 100, 100));
    printf("after memset2D %s\n", state(0)); CHECK(cudaMemcpyAsync(p, small, 64, cudaMemcpyDeviceToDevice, 0));
    CHECK(cudaMemcpy(p + 100, small, 64, cudaMemcpyDeviceToDevice)); printf("after copies on the card %s\n", state(0)); *f = 1; uint32_t x;
    CHECK(cudaMemcpy(&x, p, 4, cudaMemcpyDeviceToHost)); printf("%x\n", x);
}
CASE(calls_do_not_wait) {  // nothing here waits for a kernel that runs, natively
    warm(); auto n = stream(); auto f = flag(); await<<<1, 1, 0, n>>>(f); uint32_t *p, *q; size_t a, b; CHECK(cudaMalloc(&p, 64 * MiB));
    printf("cudaMalloc %s\n", state(n)); CHECK(cudaMalloc(&q, 100)); printf("small cudaMalloc %s\n", state(n)); CHECK(cudaMemGetInfo(&a, &b));
    printf("cudaMemGetInfo %s\n", state(n)); cudaPointerAttributes at; CHECK(cudaPointerGetAttributes(&at, p)); printf("attributes %s\n", state(n));
    auto s = stream(); cudaEvent_t e; CHECK(cudaEventCreate(&e)); CHECK(cudaEventRecord(e, s)); CHECK(cudaEventSynchronize(e));
    CHECK(cudaMallocAsync(&q, MiB, s)); CHECK(cudaFreeAsync(q, s)); CHECK(cudaStreamSynchronize(s)); printf("async %s\n", state(n));
    fill<<<64, 256, 0, s>>>(p, 16 * MiB, 1); CHECK(cudaStreamSynchronize(s)); printf("kernel beside %s\n", state(n)); *f = 1; CHECK(cudaDeviceSynchronize());
    WANT(!wrong_on_device(p, 16 * MiB, 1));
}
CASE(query_while_running) {
    warm(); auto s = stream(); auto p = zeros(); cudaEvent_t a, b; CHECK(cudaEventCreate(&a)); CHECK(cudaEventCreate(&b)); uint32_t *h;
    CHECK(cudaMallocHost(&h, N * 4)); CHECK(cudaEventRecord(a, s)); CHECK(cudaMemcpyAsync(p, h, N * 4, cudaMemcpyHostToDevice, s));
    spin<<<1, 1, 0, s>>>(20000000); CHECK(cudaEventRecord(b, s)); long loops = 0; cudaError_t r; while ((r = cudaEventQuery(b)) == cudaErrorNotReady) loops++;
    CHECK(r); float ms; CHECK(cudaEventElapsedTime(&ms, a, b)); WANT(loops > 10 && ms >= 19 && ms < 3000);
}
CASE(events) {
    cudaEvent_t t, n, bl; CHECK(cudaEventCreate(&t)); CHECK(cudaEventCreateWithFlags(&n, cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&bl, cudaEventBlockingSync)); float ms; SAY(cudaEventQuery(t)); SAY(cudaEventElapsedTime(&ms, t, bl));
    CHECK(cudaEventRecord(t)); CHECK(cudaEventRecord(n)); spin<<<1, 1>>>(3000000); CHECK(cudaEventRecord(bl)); CHECK(cudaEventSynchronize(bl));
    CHECK(cudaEventElapsedTime(&ms, t, bl)); WANT(ms > 2.5); SAY(cudaEventElapsedTime(&ms, t, n)); cudaEvent_t x;
    SAY(cudaEventCreateWithFlags(&x, cudaEventInterprocess)); SAY(cudaEventCreateWithFlags(&x, cudaEventInterprocess | cudaEventDisableTiming));
    SAY(cudaEventCreateWithFlags(&x, 64)); SAY(cudaEventRecordWithFlags(t, 0, cudaEventRecordExternal)); cudaGetLastError(); CHECK(cudaEventDestroy(t));
}
CASE(priorities) {
    int low, high; CHECK(cudaDeviceGetStreamPriorityRange(&low, &high)); printf("%d %d\n", low, high); auto p = zeros();
    for (int i = low; i >= high - 1; i--) { cudaStream_t s; CHECK(cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, i)); int seen, dev; unsigned f;
    CHECK(cudaStreamGetPriority(s, &seen)); CHECK(cudaStreamGetFlags(s, &f)); CHECK(cudaStreamGetDevice(s, &dev));
    printf("%d flags %u device %d\n", seen, f, dev); add<<<64, 256, 0, s>>>(p, N, 1u); CHECK(cudaStreamSynchronize(s)); CHECK(cudaStreamDestroy(s)); }
}
struct Heard { std::atomic<int> calls{0}; std::vector<int> order; std::thread helper; };
CASE(callbacks) {  // in order, allocating, starting threads that use CUDA themselves
    static Heard h; auto s = stream(); auto p = zeros(); for (int i = 0; i < 50; i++) { add<<<64, 256, 0, s>>>(p, N, 1u);
    CHECK(cudaStreamAddCallback(s, [](cudaStream_t, cudaError_t e, void *n) { WANT(e == cudaSuccess); h.order.push_back(int((intptr_t)n)); h.calls++; }, (void *)(intptr_t)i, 0));
    }
    CHECK(cudaLaunchHostFunc(s, [](void *) { h.helper = std::thread([] { auto q = device(N); auto t = stream(); fill<<<64, 256, 0, t>>>(q, N, 3); CHECK(cudaStreamSynchronize(t)); CHECK(cudaFree(q)); h.calls += 100; }); }, nullptr));
    CHECK(cudaStreamSynchronize(s)); h.helper.join(); for (int i = 0; i < 50; i++) WANT(h.order[i] == i); printf("%d\n", h.calls.load());
}
CASE(host_function_waits) {  // a host function that waits for a thread that launches in another stream
    warm(); static std::atomic<int> go, done; auto s = stream(), t = stream(); auto p = zeros();
    CHECK(cudaLaunchHostFunc(s, [](void *) { go = 1; while (!done) usleep(100); }, nullptr)); add<<<64, 256, 0, s>>>(p, N, 1u);
    std::thread other([&] { while (!go); auto q = device(N); fill<<<64, 256, 0, t>>>(q, N, 1); CHECK(cudaStreamSynchronize(t)); done = 1; });
    CHECK(cudaStreamSynchronize(s)); other.join(); uint32_t x; CHECK(cudaMemcpy(&x, p, 4, cudaMemcpyDeviceToHost)); printf("%u\n", x);
}
CASE(cuda_calls_in_callback) {  // forbidden; the errors have to be the same
    static int answers[4]; auto s = stream(); CHECK(cudaFree(0)); static auto p = device(N); static auto e = [] { cudaEvent_t e; CHECK(cudaEventCreate(&e));
    return e; }();
    CHECK(cudaLaunchHostFunc(s, [](void *) { void *q; answers[0] = cudaMalloc(&q, MiB); answers[1] = cudaEventQuery(e); int d; answers[2] = cudaGetDevice(&d); answers[3] = cudaMemsetAsync(p, 0, 4, 0); }, nullptr));
    CHECK(cudaStreamSynchronize(s)); for (int a : answers) printf("%s\n", said(cudaError_t(a))); SAY(cudaGetLastError());
}
CASE(wait_value) {  // a stream waits for a word in device memory, which another stream writes
    warm(); for (size_t n : {size_t(4), N}) { auto w = zeros(n), p = zeros(); auto a = CUstream(stream()), b = CUstream(stream());
    auto r = cuStreamWaitValue32(a, CUdeviceptr(w), 5, CU_STREAM_WAIT_VALUE_GEQ); printf("%s\n", said(r)); if (r) continue; add<<<64, 256, 0, a>>>(p, N, 1u);
    usleep(10000); printf("%s\n", state(a)); CHECK(cuStreamWriteValue32(b, CUdeviceptr(w), 6, 0)); CHECK(cudaStreamSynchronize(a)); uint32_t x;
    CHECK(cudaMemcpy(&x, w, 4, cudaMemcpyDeviceToHost)); printf("%u\n", x); }
}
CASE(wait_value_of_host) {
    warm(); auto f = flag(); CUdeviceptr d; CHECK(cudaHostGetDevicePointer((void **)&d, (void *)f, 0)); auto s = stream();
    CHECK(cuStreamWaitValue32(s, d, 1, CU_STREAM_WAIT_VALUE_EQ)); CHECK(cuStreamWriteValue32(s, d + 4, 9, 0)); printf("%s %d\n", state(s), f[1]); f[0] = 1;
    CHECK(cudaStreamSynchronize(s)); printf("%d\n", f[1]); uint64_t *m; CHECK(cudaMallocManaged(&m, 64)); SAY(cuStreamWriteValue64(s, CUdeviceptr(m), 3, 0));
    SAY(cudaStreamSynchronize(s));
}
CASE(batch_of_operations) {
    for (size_t n : {size_t(16), N}) { auto w = CUdeviceptr(zeros(n)); auto s = stream(); CUstreamBatchMemOpParams op[3] = {};
    op[0].writeValue = {CU_STREAM_MEM_OP_WRITE_VALUE_32, w, {7}, 0}; op[1].waitValue = {CU_STREAM_MEM_OP_WAIT_VALUE_32, w, {7}, CU_STREAM_WAIT_VALUE_EQ};
    op[2].writeValue = {CU_STREAM_MEM_OP_WRITE_VALUE_64, w + 8, {}, 0}; op[2].writeValue.value64 = 1ull << 40; SAY(cuStreamBatchMemOp(s, 3, op, 0));
    SAY(cudaStreamSynchronize(s)); uint32_t v[4]; CHECK(cudaMemcpy(v, (void *)w, 16, cudaMemcpyDeviceToHost)); printf("%u %u\n", v[0], v[3]);
    SAY(cuStreamBatchMemOp(s, 0, op, 0)); SAY(cuStreamBatchMemOp(s, 1, op, 9)); }
}
CASE(across) {
    auto p = zeros(); std::vector<cudaStream_t> s; cudaEvent_t e; CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    for (int i = 0; i < 32; i++) s.push_back(stream()); for (int i = 0; i < 640; i++) { add<<<64, 256, 0, s[i % 32]>>>(p, N, 1u);
    CHECK(cudaEventRecord(e, s[i % 32])); CHECK(cudaStreamWaitEvent(s[(i + 1) % 32], e, 0)); } CHECK(cudaDeviceSynchronize()); std::vector<uint32_t> v(N);
    CHECK(cudaMemcpy(v.data(), p, N * 4, cudaMemcpyDeviceToHost)); for (auto x : v) WANT(x == 640); for (auto x : s) CHECK(cudaStreamDestroy(x));
}
CASE(thirty_two_at_once) {
    warm(); std::vector<cudaStream_t> s; auto f = flag(); auto p = zeros(); for (int i = 0; i < 32; i++) { s.push_back(stream()); await<<<1, 1, 0, s[i]>>>(f);
    add<<<4, 256, 0, s[i]>>>(p + i * 1024, 1024, uint32_t(i)); } int busy = 0; for (auto x : s) busy += cudaStreamQuery(x) == cudaErrorNotReady;
    printf("%d busy\n", busy); *f = 1; CHECK(cudaDeviceSynchronize()); std::vector<uint32_t> v(32 * 1024);
    CHECK(cudaMemcpy(v.data(), p, v.size() * 4, cudaMemcpyDeviceToHost)); for (size_t i = 0; i < v.size(); i++) WANT(v[i] == i / 1024);
}
CASE(destroyed_while_busy) {
    auto p = zeros(); for (int i = 0; i < 20; i++) { auto s = stream(); spin<<<1, 1, 0, s>>>(2000000); add<<<64, 256, 0, s>>>(p + i * 1024, 1024, 1u);
    CHECK(cudaStreamDestroy(s)); } CHECK(cudaDeviceSynchronize()); uint32_t x; CHECK(cudaMemcpy(&x, p + 19 * 1024, 4, cudaMemcpyDeviceToHost));
    printf("%u\n", x);
}
CASE(attributes) {
    auto s = stream(), t = stream(); cudaStreamAttrValue v{}; v.syncPolicy = cudaSyncPolicyBlockingSync;
    CHECK(cudaStreamSetAttribute(s, cudaLaunchAttributeSynchronizationPolicy, &v)); CHECK(cudaStreamCopyAttributes(t, s)); cudaStreamAttrValue w{};
    CHECK(cudaStreamGetAttribute(t, cudaLaunchAttributeSynchronizationPolicy, &w)); printf("%d\n", w.syncPolicy); unsigned long long a, b;
    CHECK(cudaStreamGetId(s, &a)); CHECK(cudaStreamGetId(t, &b)); WANT(a != b); CUcontext c, d; CHECK(cuStreamGetCtx(s, &c)); CHECK(cuCtxGetCurrent(&d));
    WANT(c == d); spin<<<1, 1, 0, s>>>(1000000); CHECK(cudaStreamSynchronize(s));
}
CASE(recorded_elsewhere) {
    auto s = stream(), t = stream(); cudaEvent_t e; CHECK(cudaEventCreate(&e)); SAY(cudaStreamWaitEvent(s, e, 0)); CHECK(cudaEventRecord(e, t));
    CHECK(cudaStreamWaitEvent(s, e, 0)); CHECK(cudaEventDestroy(e)); CHECK(cudaStreamSynchronize(s)); SAY(cudaEventQuery(nullptr));
    SAY(cudaStreamWaitEvent(s, nullptr, 0)); SAY(cudaEventRecord(nullptr, s)); SAY(cudaStreamDestroy(nullptr)); cudaGetLastError();
}
