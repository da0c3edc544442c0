// The driver API by itself: modules and libraries from PTX, their variables, packed parameters, contexts that come and go with what
// was allocated in them, green contexts. An interposer has to follow which context is current, and what dies with it.
#include "check.h"
static const char PTX[] = R"(.version 7.8
.target sm_70
.address_size 64
.visible .global .align 4 .u32 bias = 3;
.visible .const .align 4 .u32 factor = 1;
.visible .entry scale(.param .u64 p, .param .u32 n, .param .u32 by) {
 .reg .pred %q; .reg .u32 %r<9>; .reg .u64 %d<4>;
 ld.param.u64 %d0, [p]; ld.param.u32 %r0, [n]; ld.param.u32 %r1, [by];
 mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x; mad.lo.u32 %r4, %r2, %r3, %r4;
 setp.ge.u32 %q, %r4, %r0; @%q ret;
 mul.wide.u32 %d1, %r4, 4; add.u64 %d1, %d0, %d1; ld.global.u32 %r5, [%d1]; ld.global.u32 %r6, [bias]; ld.const.u32 %r7, [factor];
 mul.lo.u32 %r5, %r5, %r1; mul.lo.u32 %r5, %r5, %r7; add.u32 %r5, %r5, %r6; st.global.u32 [%d1], %r5; ret; })";
const unsigned N = 100000;
struct Work {  // N words in the current context
    CUdeviceptr p; CUmodule m; CUfunction f;
    Work() { CHECK(cuModuleLoadData(&m, PTX)); CHECK(cuModuleGetFunction(&f, m, "scale")); CHECK(cuMemAlloc(&p, N * 4)); CHECK(cuMemsetD32(p, 1, N)); }
    void launch(unsigned by, CUstream s = 0) { unsigned n = N; void *a[] = {&p, &n, &by};
    CHECK(cuLaunchKernel(f, (N + 255) / 256, 1, 1, 256, 1, 1, 0, s, a, nullptr)); }
    void want(unsigned v) { std::vector<unsigned> h(N); CHECK(cuMemcpyDtoH(h.data(), p, N * 4)); for (auto x : h) WANT(x == v); }
};
static CUcontext context(unsigned flags = 0) { static bool once = (CHECK(cuInit(0)), true); CUcontext c; CHECK(cuCtxCreate(&c, nullptr, flags, 0)); return c; }

CASE(from_ptx) { context(); Work w; w.launch(2); w.want(5); CHECK(cuMemFree(w.p)); CHECK(cuModuleUnload(w.m)); }
CASE(variables) {
    context(); Work w; CUdeviceptr bias, factor; size_t n; CHECK(cuModuleGetGlobal(&bias, &n, w.m, "bias")); printf("%zu\n", n);
    CHECK(cuModuleGetGlobal(&factor, nullptr, w.m, "factor")); unsigned v = 10; CHECK(cuMemcpyHtoD(bias, &v, 4)); CHECK(cuMemsetD32(factor, 4, 1)); w.launch(2);
    w.want(18); SAY(cuModuleGetGlobal(&bias, &n, w.m, "nothing")); SAY(cuModuleGetFunction(&w.f, w.m, "nothing"));
}
CASE(packed_parameters) {
    context(); Work w; struct { CUdeviceptr p; unsigned n, by; } packed{w.p, N, 3}; size_t size = sizeof packed;
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &size, CU_LAUNCH_PARAM_END};
    CHECK(cuLaunchKernel(w.f, (N + 255) / 256, 1, 1, 256, 1, 1, 0, 0, nullptr, extra)); w.want(6);
}
CASE(libraries) {
    context(); CUlibrary l; CUkernel k; CUfunction f; CHECK(cuLibraryLoadData(&l, PTX, nullptr, nullptr, 0, nullptr, nullptr, 0));
    CHECK(cuLibraryGetKernel(&k, l, "scale")); CHECK(cuKernelGetFunction(&f, k)); Work w; w.f = CUfunction(k); w.launch(2); w.want(5); w.f = f; w.launch(2);
    w.want(13); CUdeviceptr d; size_t n; CHECK(cuLibraryGetGlobal(&d, &n, l, "bias")); CHECK(cuMemsetD32(d, 0, 1)); w.launch(2); w.want(26); unsigned count;
    CHECK(cuLibraryGetKernelCount(&count, l)); printf("%u\n", count); CHECK(cuLibraryUnload(l));
}
CASE(launch_ex) {
    context(); Work w; CUlaunchAttribute a[1]{}; a->id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION; a->value.clusterDim = {2, 1, 1}; CUlaunchConfig c{};
    c.gridDimX = (N + 511) / 512 * 2; c.gridDimY = c.gridDimZ = 1; c.blockDimX = 256; c.blockDimY = c.blockDimZ = 1; c.attrs = a; c.numAttrs = 1;
    unsigned n = N, by = 4; void *p[] = {&w.p, &n, &by}; auto r = cuLaunchKernelEx(&c, w.f, p, nullptr); printf("%s\n", said(r));
    if (r == CUDA_SUCCESS) w.want(7); c.numAttrs = 0; CHECK(cuLaunchKernelEx(&c, w.f, p, nullptr)); CHECK(cuCtxSynchronize());
}
CASE(linked) {
    context(); CUlinkState s; void *image; size_t size; CHECK(cuLinkCreate(0, nullptr, nullptr, &s));
    CHECK(cuLinkAddData(s, CU_JIT_INPUT_PTX, (void *)PTX, sizeof PTX, "scale", 0, nullptr, nullptr)); CHECK(cuLinkComplete(s, &image, &size)); Work w;
    CUmodule m; CHECK(cuModuleLoadDataEx(&m, image, 0, nullptr, nullptr)); CHECK(cuLinkDestroy(s)); CHECK(cuModuleGetFunction(&w.f, m, "scale")); w.launch(5);
    w.want(8);
}
CASE(bad_ptx) {
    context(); CUmodule m; SAY(cuModuleLoadData(&m, ".version 7.8 nonsense")); SAY(cuModuleLoadData(&m, nullptr)); SAY(cuModuleLoad(&m, "/nonexistent"));
    Work w; w.launch(2); w.want(5);
}
CASE(function_attributes) {
    context(); Work w; for (int a = 0; a < 10; a++) { int v = -1; auto r = cuFuncGetAttribute(&v, CUfunction_attribute(a), w.f);
    printf("%d: %s %d\n", a, said(r), a == 4 || a == 5 || a == 6 ? 0 : v); } size_t o, n; CHECK(cuFuncGetParamInfo(w.f, 2, &o, &n)); printf("%zu %zu\n", o, n);
    const char *called; CHECK(cuFuncGetName(&called, w.f)); puts(called);
}
CASE(stack_of_contexts) {  // pushed, popped, each with memory of its own, all at work
    std::vector<CUcontext> c; std::vector<Work> w; for (int i = 0; i < 4; i++) { c.push_back(context()); w.emplace_back(); CHECK(cuCtxPopCurrent(nullptr)); }
    CUcontext now; CHECK(cuCtxGetCurrent(&now)); printf("none %d\n", now == nullptr);
    for (int round = 0; round < 5; round++) for (int i = 0; i < 4; i++) { CHECK(cuCtxPushCurrent(c[i])); w[i].launch(1); CHECK(cuCtxPopCurrent(&now));
    WANT(now == c[i]); } for (int i = 0; i < 4; i++) { CHECK(cuCtxSetCurrent(c[i])); w[i].want(16); CHECK(cuCtxDestroy(c[i])); } CHECK(cuCtxGetCurrent(&now));
    printf("none %d\n", now == nullptr); SAY(cuCtxSynchronize());
}
CASE(destroyed_with_memory) {  // 3 GiB in all, if they were not given back
    for (int i = 0; i < 6; i++) { auto c = context(); CUdeviceptr p[4]; for (auto &x : p) { CHECK(cuMemAlloc(&x, 128 * MiB));
    CHECK(cuMemsetD8(x, i, 128 * MiB)); } CUstream s; CHECK(cuStreamCreate(&s, 0)); Work w; w.launch(2, s); CHECK(cuCtxDestroy(c)); SAY(cuMemAlloc(p, 4)); }
    context(); Work w; w.launch(2); w.want(5);
}
CASE(foreign_pointer) {
    auto a = context(); Work w; w.launch(2); CHECK(cuCtxSynchronize()); auto b = context(); std::vector<unsigned> h(N); SAY(cuMemcpyDtoH(h.data(), w.p, N * 4));
    printf("%u\n", h[9]); SAY(cuMemsetD32(w.p, 4, N)); SAY(cuMemFree(w.p)); CHECK(cuCtxSetCurrent(a)); SAY(cuMemFree(w.p)); SAY(cuCtxDestroy(b));
    SAY(cuCtxDestroy(a));
}
CASE(primary) {
    CHECK(cuInit(0)); CUcontext c, d; unsigned f; int active; CHECK(cuDevicePrimaryCtxGetState(0, &f, &active)); printf("%d\n", active);
    CHECK(cuDevicePrimaryCtxSetFlags(0, CU_CTX_SCHED_BLOCKING_SYNC)); CHECK(cuDevicePrimaryCtxRetain(&c, 0)); CHECK(cuDevicePrimaryCtxRetain(&d, 0));
    WANT(c == d); CHECK(cuCtxSetCurrent(c)); { Work w; w.launch(2); w.want(5); } CHECK(cuDevicePrimaryCtxGetState(0, &f, &active));
    printf("%d flags %u\n", active, f); CHECK(cuDevicePrimaryCtxRelease(0)); { Work w; w.launch(2); w.want(5); } CHECK(cuDevicePrimaryCtxRelease(0));
    CHECK(cuDevicePrimaryCtxGetState(0, &f, &active)); printf("%d\n", active); CUdeviceptr p; SAY(cuMemAlloc(&p, 4)); CHECK(cuDevicePrimaryCtxRetain(&c, 0));
    CHECK(cuCtxSetCurrent(c)); { Work w; w.launch(2); w.want(5); } CHECK(cuDevicePrimaryCtxReset(0)); SAY(cuMemAlloc(&p, 4));
}
CASE(context_of_threads) {
    auto c = context(); Work w;
    std::thread([&] { CUcontext now; CHECK(cuCtxGetCurrent(&now)); printf("none %d\n", now == nullptr); CUdeviceptr p; SAY(cuMemAlloc(&p, 100000)); CHECK(cuCtxSetCurrent(c)); w.launch(2); CHECK(cuMemAlloc(&p, 100000)); CHECK(cuCtxSynchronize()); }).join();
    w.want(5); unsigned v; CHECK(cuCtxGetApiVersion(c, &v)); unsigned f; CHECK(cuCtxGetFlags(&f)); CUdevice dev; CHECK(cuCtxGetDevice(&dev));
    unsigned long long id; CHECK(cuCtxGetId(c, &id)); printf("flags %u device %d id %d\n", f, dev, id > 0);
}
CASE(runtime_in_own_context) {  // cudart works in whichever context is current
    auto c = context(); auto p = device(N); fill<<<64, 256>>>(p, N, 1); CHECK(cudaDeviceSynchronize()); WANT(!wrong_on_device(p, N, 1)); CUcontext of;
    CHECK(cuPointerGetAttribute(&of, CU_POINTER_ATTRIBUTE_CONTEXT, CUdeviceptr(p))); printf("mine %d\n", of == c); CHECK(cuCtxPopCurrent(nullptr));
    auto q = device(N); fill<<<64, 256>>>(q, N, 2); WANT(!wrong_on_device(q, N, 2));
    CHECK(cuPointerGetAttribute(&of, CU_POINTER_ATTRIBUTE_CONTEXT, CUdeviceptr(q))); printf("mine %d\n", of == c); CHECK(cuCtxDestroy(c));
    WANT(!wrong_on_device(q, N, 2)); CHECK(cudaFree(q));
}
CASE(green_contexts) {
    CHECK(cuInit(0)); CUcontext primary; CHECK(cuDevicePrimaryCtxRetain(&primary, 0)); CUdevResource all, part[1], rest;
    auto r = cuDeviceGetDevResource(0, &all, CU_DEV_RESOURCE_TYPE_SM); if (r) skip("no resources to part"); unsigned groups = 1;
    CHECK(cuDevSmResourceSplitByCount(part, &groups, &all, &rest, 0, 16)); printf("%u groups %u of %u\n", groups, part[0].sm.smCount, all.sm.smCount);
    CUdevResourceDesc d; CHECK(cuDevResourceGenerateDesc(&d, part, 1)); CUgreenCtx g; CHECK(cuGreenCtxCreate(&g, d, 0, CU_GREEN_CTX_DEFAULT_STREAM));
    CUcontext c; CHECK(cuCtxFromGreenCtx(&c, g)); CHECK(cuCtxSetCurrent(c)); Work w; CUstream s;
    CHECK(cuGreenCtxStreamCreate(&s, g, CU_STREAM_NON_BLOCKING, 0)); CHECK(cuCtxSynchronize()); for (int i = 0; i < 20; i++) w.launch(1, s);
    CHECK(cuStreamSynchronize(s)); w.want(61); w.launch(1); w.want(64); CUevent e; CHECK(cuEventCreate(&e, 0)); CHECK(cuGreenCtxRecordEvent(g, e));
    CHECK(cuEventSynchronize(e)); CHECK(cuStreamDestroy(s)); CHECK(cuMemFree(w.p)); CHECK(cuCtxSetCurrent(primary)); CHECK(cuGreenCtxDestroy(g));
}
CASE(pitched) {
    context(); CUdeviceptr p; size_t pitch; CHECK(cuMemAllocPitch(&p, &pitch, 1001, 77, 4)); printf("%zu\n", pitch); CHECK(cuMemsetD2D8(p, pitch, 3, 1001, 77));
    CUdeviceptr b; size_t n; CHECK(cuMemGetAddressRange(&b, &n, p)); printf("%d %zu\n", b == p, n); CHECK(cuMemFree(p));
    SAY(cuMemAllocPitch(&p, &pitch, 1001, 77, 3)); SAY(cuMemAllocPitch(&p, &pitch, 0, 77, 4)); SAY(cuMemAllocPitch(&p, &pitch, 1, 0, 4));
    SAY(cuMemAllocPitch(nullptr, &pitch, 4, 4, 4));
}
CASE(over_limit) {
    context(); size_t free, total; CHECK(cuMemGetInfo(&free, &total)); CUdeviceptr p; SAY(cuMemAlloc(&p, total + GiB)); SAY(cuMemAlloc(&p, 0));
    SAY(cuMemAlloc(nullptr, 4)); SAY(cuMemAlloc(&p, ~size_t(0))); SAY(cuMemAllocAsync(&p, total + GiB, 0)); Work w; w.launch(2); w.want(5); SAY(cuMemFree(0));
    SAY(cuMemFree(w.p + 4)); SAY(cuMemFree(w.p)); SAY(cuMemFree(w.p)); SAY(cuMemGetInfo(nullptr, &total)); SAY(cuMemGetInfo(&free, nullptr));
    SAY(cuMemGetInfo(nullptr, nullptr));
}
