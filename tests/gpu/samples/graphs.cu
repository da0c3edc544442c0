// Graphs: built by hand and captured, updated, cloned, with memory, host, event and conditional nodes. An interposer adds calls of
// its own around allocations and launches: during a capture each of them may spoil it, and a graph keeps addresses for ever.
// build: -rdc=true -lcudadevrt
// also ptds: --default-stream per-thread
#include "check.h"
const size_t N = MiB;
struct Kernel { uint32_t *p; size_t n = N; uint32_t what; void *arguments[3] = {&p, &n, &what}; cudaKernelNodeParams params;
Kernel(uint32_t *p, uint32_t what) : p(p), what(what), params{(void *)add<uint32_t>, dim3(64), dim3(256), 0, arguments, nullptr}
{ params.func = (void *)add<uint32_t>; params.gridDim = 64; params.blockDim = 256; params.sharedMemBytes = 0; params.kernelParams = arguments;
params.extra = nullptr; } };
static cudaGraph_t graph() { cudaGraph_t g; CHECK(cudaGraphCreate(&g, 0)); return g; }
static cudaGraphExec_t exec(cudaGraph_t g, unsigned long long flags = 0) { cudaGraphExec_t e; CHECK(cudaGraphInstantiate(&e, g, flags)); return e; }
static cudaStream_t stream() { cudaStream_t s; CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking)); return s; }
static void run(cudaGraphExec_t e, int times = 1) {
    auto s = stream(); for (int i = 0; i < times; i++) CHECK(cudaGraphLaunch(e, s)); CHECK(cudaStreamSynchronize(s)); CHECK(cudaStreamDestroy(s));
}
static cudaGraphNode_t add_kernel(cudaGraph_t g, Kernel &k, std::vector<cudaGraphNode_t> after = {}) {
    cudaGraphNode_t n; CHECK(cudaGraphAddKernelNode(&n, g, after.data(), after.size(), &k.params)); return n;
}
static uint32_t *zeros() { auto p = device(N); CHECK(cudaMemset(p, 0, N * 4)); CHECK(cudaDeviceSynchronize()); return p; }
static uint32_t at(uint32_t *p, size_t i) { uint32_t v; CHECK(cudaMemcpy(&v, p + i, 4, cudaMemcpyDeviceToHost)); return v; }
static void CUDART_CB bump(void *p) { ++*(int *)p; }

CASE(by_hand) {  // set, copy in, kernels, host, copy out, empty, child
    auto g = graph(), inner = graph(); auto p = device(N), q = device(N); uint32_t *h; CHECK(cudaMallocHost(&h, N * 4)); fill_host(h, N, 1); int calls = 0;
    cudaGraphNode_t set, in, host, out, empty, child, dd; cudaMemsetParams m{}; m.dst = q; m.elementSize = 4; m.width = N; m.height = 1; m.value = 7;
    CHECK(cudaGraphAddMemsetNode(&set, g, nullptr, 0, &m)); CHECK(cudaGraphAddMemcpyNode1D(&in, g, nullptr, 0, p, h, N * 4, cudaMemcpyHostToDevice));
    Kernel a(p, 3), b(q, 5), c(p, 1); auto x = add_kernel(g, a, {in}), y = add_kernel(g, b, {set}); add_kernel(inner, c);
    CHECK(cudaGraphAddChildGraphNode(&child, g, &x, 1, inner)); cudaGraphNode_t both[] = {child, y}; CHECK(cudaGraphAddEmptyNode(&empty, g, both, 2));
    cudaHostNodeParams hp{bump, &calls}; CHECK(cudaGraphAddHostNode(&host, g, &empty, 1, &hp)); cudaMemcpy3DParms c3{};
    c3.srcPtr = make_cudaPitchedPtr(q, 4096, 1024, 1); c3.dstPtr = make_cudaPitchedPtr(p, 4096, 1024, 1); c3.extent = make_cudaExtent(4096, 1, 1);
    c3.kind = cudaMemcpyDeviceToDevice; CHECK(cudaGraphAddMemcpyNode(&dd, g, &host, 1, &c3));
    CHECK(cudaGraphAddMemcpyNode1D(&out, g, &dd, 1, h, p, N * 4, cudaMemcpyDefault));
    size_t nodes = 0, edges = 0; CHECK(cudaGraphGetNodes(g, nullptr, &nodes)); CHECK(cudaGraphGetEdges(g, nullptr, nullptr, nullptr, &edges));
    printf("%zu nodes %zu edges\n", nodes, edges); run(exec(g)); for (size_t i = 0; i < N; i++) WANT(h[i] == (i < 1024 ? 12 : value(i, 1) + 4));
    printf("%d host calls\n", calls);
    CHECK(cudaGraphDebugDotPrint(g, "/dev/null", cudaGraphDebugDotFlagsVerbose));
}
CASE(captured) {  // several streams that part and meet, on device memory allocated before, again and again
    auto s = stream(), t = stream(); cudaEvent_t fork, join; CHECK(cudaEventCreate(&fork)); CHECK(cudaEventCreate(&join)); auto p = zeros(), q = zeros();
    cudaGraph_t g; CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal)); add<<<64, 256, 0, s>>>(p, N, 1u); CHECK(cudaEventRecord(fork, s));
    CHECK(cudaStreamWaitEvent(t, fork, 0)); add<<<64, 256, 0, t>>>(q, N, 2u); CHECK(cudaMemsetAsync(q, 0, 4, t)); add<<<64, 256, 0, s>>>(p, N, 3u);
    CHECK(cudaEventRecord(join, t)); CHECK(cudaStreamWaitEvent(s, join, 0)); CHECK(cudaMemcpyAsync(p, q, 400, cudaMemcpyDeviceToDevice, s));
    cudaStreamCaptureStatus st; CHECK(cudaStreamIsCapturing(t, &st)); printf("capturing %d\n", st); CHECK(cudaStreamEndCapture(s, &g)); size_t n;
    CHECK(cudaGraphGetNodes(g, nullptr, &n)); printf("%zu nodes\n", n);
    auto e = exec(g); run(e, 10); printf("%u %u %u %u\n", at(p, 0), at(p, 99), at(p, 100), at(q, 1)); CHECK(cudaGraphUpload(e, s)); run(e);
    CHECK(cudaGraphExecDestroy(e)); CHECK(cudaGraphDestroy(g));
}
CASE(forbidden_while_capturing) {  // which calls spoil a capture, and with what error
    for (auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed}) for (int what = 0; what < 9; what++) {
        auto s = stream(); cudaGraph_t g = nullptr; void *p = nullptr; static void *kept = device(MiB); size_t a, b; cudaEvent_t e; CHECK(cudaEventCreate(&e));
        auto free_me = device(MiB); CHECK(cudaDeviceSynchronize()); CHECK(cudaStreamBeginCapture(s, mode)); printf("mode %d: ", mode);
        switch (what) { case 0: SAY(cudaMalloc(&p, MiB)); break; case 1: SAY(cudaFree(free_me)); break;
        case 2: SAY(cudaMemcpy(&a, kept, 4, cudaMemcpyDeviceToHost)); break; case 3: SAY(cudaDeviceSynchronize()); break; case 4: SAY(cudaMemGetInfo(&a, &b));
        break; case 5: SAY(cudaStreamSynchronize(s)); break; case 6: SAY(cudaEventQuery(e)); break; case 7: SAY(cudaMallocHost(&p, 4096)); break;
        case 8: SAY(cudaMemset(kept, 0, 4)); }
        cudaStreamCaptureStatus st; CHECK(cudaStreamIsCapturing(s, &st)); printf("  status %d: ", st); SAY(cudaStreamEndCapture(s, &g)); cudaGetLastError();
    }
}
CASE(other_thread_meanwhile) {  // a relaxed or thread-local capture leaves other threads free to allocate, launch and wait
    auto s = stream(); auto p = zeros(); cudaGraph_t g; CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    std::thread([] { for (int i = 0; i < 20; i++) { auto q = device(N); auto t = stream(); fill<<<64, 256, 0, t>>>(q, N, i); CHECK(cudaStreamSynchronize(t)); std::vector<uint32_t> h(N); CHECK(cudaMemcpyAsync(h.data(), q, N * 4, cudaMemcpyDeviceToHost, t)); CHECK(cudaStreamSynchronize(t)); WANT(!wrong(h.data(), N, i)); CHECK(cudaFree(q)); CHECK(cudaStreamDestroy(t)); } }).join();
    add<<<64, 256, 0, s>>>(p, N, 1u); CHECK(cudaStreamEndCapture(s, &g)); run(exec(g), 5); printf("%u\n", at(p, 5));
}
CASE(malloc_in_relaxed) {
    auto s = stream(); cudaGraph_t g; CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed)); auto p = device(N); fill<<<64, 256, 0, s>>>(p, N, 4);
    CHECK(cudaStreamEndCapture(s, &g)); run(exec(g)); WANT(!wrong_on_device(p, N, 4));
}
CASE(exchanged_mode) {
    auto s = stream(); cudaGraph_t g; auto m = cudaStreamCaptureModeRelaxed; CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    CHECK(cudaThreadExchangeStreamCaptureMode(&m)); printf("%d\n", m); uint32_t *p = device(N); CHECK(cudaThreadExchangeStreamCaptureMode(&m));
    printf("%d\n", m); fill<<<64, 256, 0, s>>>(p, N, 1); CHECK(cudaStreamEndCapture(s, &g)); run(exec(g)); WANT(!wrong_on_device(p, N, 1));
}
CASE(capture_to_graph) {
    auto s = stream(); auto p = zeros(); auto g = graph(); Kernel k(p, 1); auto n = add_kernel(g, k);
    CHECK(cudaStreamBeginCaptureToGraph(s, g, &n, nullptr, 1, cudaStreamCaptureModeGlobal)); add<<<64, 256, 0, s>>>(p, N, 2u); unsigned long long id;
    cudaStreamCaptureStatus st; cudaGraph_t now; const cudaGraphNode_t *deps; size_t count;
    CHECK(cudaStreamGetCaptureInfo(s, &st, &id, &now, &deps, nullptr, &count)); WANT(now == g); printf("%d %zu\n", st, count);
    CHECK(cudaStreamEndCapture(s, &now)); run(exec(g), 3); printf("%u\n", at(p, 1));
}
CASE(updated) {
    auto p = zeros(), q = zeros(); auto g = graph(); Kernel k(p, 1); auto n = add_kernel(g, k); auto e = exec(g); run(e); Kernel l(q, 10);
    CHECK(cudaGraphExecKernelNodeSetParams(e, n, &l.params)); run(e); printf("%u %u\n", at(p, 0), at(q, 0)); auto g2 = graph(); Kernel m(p, 100);
    add_kernel(g2, m); cudaGraphExecUpdateResultInfo r; SAY(cudaGraphExecUpdate(e, g2, &r)); printf("%d\n", r.result); run(e);
    printf("%u %u\n", at(p, 0), at(q, 0));
    auto g3 = graph(); cudaGraphNode_t x; CHECK(cudaGraphAddEmptyNode(&x, g3, nullptr, 0)); SAY(cudaGraphExecUpdate(e, g3, &r)); cudaGetLastError();
    printf("%d\n", r.result); CHECK(cudaGraphNodeSetEnabled(e, n, 0)); run(e); printf("%u\n", at(p, 0)); cudaKernelNodeParams seen;
    CHECK(cudaGraphKernelNodeGetParams(n, &seen)); printf("%u %u\n", seen.gridDim.x, seen.blockDim.x);
    auto f = graph(); uint32_t *h; CHECK(cudaMallocHost(&h, 64)); CHECK(cudaGraphAddMemcpyNode1D(&x, f, nullptr, 0, h, p, 64, cudaMemcpyDeviceToHost));
    e = exec(f); CHECK(cudaGraphExecMemcpyNodeSetParams1D(e, x, h, q, 64, cudaMemcpyDeviceToHost)); run(e); printf("%u\n", h[3]);
}
CASE(cloned) {
    auto p = zeros(); auto g = graph(); Kernel k(p, 1); auto n = add_kernel(g, k); cudaGraph_t c; CHECK(cudaGraphClone(&c, g)); cudaGraphNode_t m;
    CHECK(cudaGraphNodeFindInClone(&m, n, c)); Kernel l(p, 10); CHECK(cudaGraphKernelNodeSetParams(m, &l.params)); run(exec(g)); run(exec(c));
    printf("%u\n", at(p, 0)); CHECK(cudaGraphDestroy(g)); run(exec(c)); printf("%u\n", at(p, 0)); CHECK(cudaGraphDestroyNode(m)); size_t left;
    CHECK(cudaGraphGetNodes(c, nullptr, &left)); printf("%zu\n", left);
}
CASE(events) {
    auto g = graph(); auto p = zeros(); cudaEvent_t a, b; CHECK(cudaEventCreate(&a)); CHECK(cudaEventCreate(&b)); cudaGraphNode_t x, y, w;
    CHECK(cudaGraphAddEventRecordNode(&x, g, nullptr, 0, a)); Kernel k(p, 1); auto n = add_kernel(g, k, {x});
    CHECK(cudaGraphAddEventRecordNode(&y, g, &n, 1, b)); CHECK(cudaGraphAddEventWaitNode(&w, g, &y, 1, b)); run(exec(g)); float ms = -1;
    CHECK(cudaEventElapsedTime(&ms, a, b)); WANT(ms >= 0 && ms < 5000); CHECK(cudaEventQuery(b));
}
CASE(host_nodes) {
    auto s = stream(); auto p = zeros(); int calls = 0; cudaGraph_t g; CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < 5; i++) { add<<<64, 256, 0, s>>>(p, N, 1u); CHECK(cudaLaunchHostFunc(s, bump, &calls)); } CHECK(cudaStreamEndCapture(s, &g));
    run(exec(g), 20); printf("%d %u\n", calls, at(p, 0));
}
CASE(memory_nodes) {  // as graphMemoryNodes: allocated and freed inside, kept by the device until trimmed
    auto g = graph(); cudaMemAllocNodeParams a{}; a.poolProps.allocType = cudaMemAllocationTypePinned; a.poolProps.location = {cudaMemLocationTypeDevice, 0};
    a.bytesize = N * 4; cudaGraphNode_t x, set, f; CHECK(cudaGraphAddMemAllocNode(&x, g, nullptr, 0, &a)); auto out = zeros(); auto q = (uint32_t *)a.dptr;
    cudaMemsetParams m{}; m.dst = q; m.elementSize = 4; m.width = N; m.height = 1; m.value = 5; CHECK(cudaGraphAddMemsetNode(&set, g, &x, 1, &m));
    Kernel k(q, 2); auto n = add_kernel(g, k, {set}); cudaGraphNode_t c; CHECK(cudaGraphAddMemcpyNode1D(&c, g, &n, 1, out, q, N * 4, cudaMemcpyDeviceToDevice));
    CHECK(cudaGraphAddMemFreeNode(&f, g, &c, 1, q)); auto e = exec(g); run(e, 3); printf("%u\n", at(out, N - 1));
    uint64_t used, reserved; CHECK(cudaDeviceGetGraphMemAttribute(0, cudaGraphMemAttrUsedMemCurrent, &used));
    CHECK(cudaDeviceGetGraphMemAttribute(0, cudaGraphMemAttrReservedMemCurrent, &reserved)); printf("used %zu reserved %d\n", size_t(used), reserved >= N * 4);
    CHECK(cudaGraphExecDestroy(e)); CHECK(cudaGraphDestroy(g)); CHECK(cudaDeviceGraphMemTrim(0));
    CHECK(cudaDeviceGetGraphMemAttribute(0, cudaGraphMemAttrReservedMemCurrent, &reserved)); printf("after trim %zu\n", size_t(reserved));
}
CASE(memory_across_graphs) {  // allocated by one graph, used by the stream, freed by another graph, by the stream, and by itself at the next launch
    auto s = stream(); cudaGraph_t g, f; uint32_t *p; CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal)); CHECK(cudaMallocAsync(&p, N * 4, s));
    fill<<<64, 256, 0, s>>>(p, N, 1); CHECK(cudaStreamEndCapture(s, &g)); CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    CHECK(cudaFreeAsync(p, s)); CHECK(cudaStreamEndCapture(s, &f)); auto e = exec(g), d = exec(f); CHECK(cudaGraphLaunch(e, s));
    CHECK(cudaStreamSynchronize(s)); WANT(!wrong_on_device(p, N, 1)); SAY(cudaGraphLaunch(e, s)); cudaGetLastError(); CHECK(cudaGraphLaunch(d, s));
    CHECK(cudaGraphLaunch(e, s)); CHECK(cudaFreeAsync(p, s)); CHECK(cudaStreamSynchronize(s)); CHECK(cudaGraphLaunch(e, s)); CHECK(cudaStreamSynchronize(s));
    WANT(!wrong_on_device(p, N, 1)); CHECK(cudaFree(p));
    CHECK(cudaGraphExecDestroy(d)); CHECK(cudaGraphDestroy(f)); auto again = exec(graph(), cudaGraphInstantiateFlagAutoFreeOnLaunch); run(again);
    CHECK(cudaGraphExecDestroy(e)); e = exec(g, cudaGraphInstantiateFlagAutoFreeOnLaunch); run(e, 5); WANT(!wrong_on_device(p, N, 1));
}
CASE(many_launches) {
    auto s = stream(); auto p = zeros(); cudaGraph_t g; CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < 100; i++) add<<<4, 256, 0, s>>>(p, 1024, 1u); CHECK(cudaStreamEndCapture(s, &g)); run(exec(g), 1000); printf("%u\n", at(p, 1023));
}
CASE(reinstantiated) {
    auto p = zeros(); auto g = graph(); Kernel k(p, 1); add_kernel(g, k); for (int i = 0; i < 200; i++) { auto e = exec(g); run(e);
    CHECK(cudaGraphExecDestroy(e)); } printf("%u\n", at(p, 7));
}
CASE(user_objects) {
    static int dead; { cudaUserObject_t o; CHECK(cudaUserObjectCreate(&o, &dead, bump, 1, cudaUserObjectNoDestructorSync)); auto g = graph();
    CHECK(cudaGraphRetainUserObject(g, o, 1, cudaGraphUserObjectMove)); auto p = zeros(); Kernel k(p, 1); add_kernel(g, k); auto e = exec(g); run(e);
    CHECK(cudaGraphDestroy(g)); printf("%d\n", dead); CHECK(cudaGraphExecDestroy(e)); } for (int i = 0; i < 1000 && !*(volatile int *)&dead; i++) usleep(1000);
    printf("%d\n", dead);
}
__global__ void count_down(cudaGraphConditionalHandle h, uint32_t *left) { cudaGraphSetConditional(h, --*left > 0); }
CASE(conditional) {  // while
    auto g = graph(); auto p = zeros(), left = device(1); uint32_t ten = 10; CHECK(cudaMemcpy(left, &ten, 4, cudaMemcpyHostToDevice));
    cudaGraphConditionalHandle h; CHECK(cudaGraphConditionalHandleCreate(&h, g, 1, cudaGraphCondAssignDefault)); cudaGraphNodeParams c{};
    c.type = cudaGraphNodeTypeConditional; c.conditional.handle = h; c.conditional.type = cudaGraphCondTypeWhile; c.conditional.size = 1; cudaGraphNode_t n, d;
    CHECK(cudaGraphAddNode(&n, g, nullptr, nullptr, 0, &c)); auto body = c.conditional.phGraph_out[0]; Kernel k(p, 1); auto x = add_kernel(body, k);
    void *arguments[] = {&h, &left}; cudaKernelNodeParams down{}; down.func = (void *)count_down; down.gridDim = down.blockDim = 1;
    down.kernelParams = arguments; CHECK(cudaGraphAddKernelNode(&d, body, &x, 1, &down)); run(exec(g)); printf("%u\n", at(p, 3));
}
