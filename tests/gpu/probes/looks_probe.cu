// What cuCtxRecordEvent and cuStreamQuery(legacy) see and disturb, beyond what is known of living streams of one context:
// streams destroyed with work in flight, contexts that are not primary, green contexts, captures of another context, full queues, and what
// each call costs. Prints one line a question.
// nvcc -std=c++17 -arch=sm_90 looks_probe.cu -o looks_probe -lcuda && ./looks_probe
#include <cuda.h>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>
#define C(x) do { CUresult err_ = (x); if (err_) { printf("error %d at line %d: %s\n", err_, __LINE__, #x); fflush(stdout); exit(1); } } while (0)
static const char *PTX = ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry k(){ret;}\n";
static std::atomic<int> hold{0}, inside{0};
static void CUDA_CB held(void *) { inside++; while (hold.load()) std::this_thread::sleep_for(std::chrono::microseconds(50)); inside--; }
static void CUDA_CB nothing(void *) {}
static void ms(int n) { std::this_thread::sleep_for(std::chrono::milliseconds(n)); }
static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
static const char *R(CUresult r) { static thread_local char b[8][16]; static thread_local int i = 0; char *p = b[i++ % 8]; snprintf(p, 16, r == 0 ? "ok" : r == 600 ? "NOT_READY" : "%d", r); return p; }
struct Ctx { CUcontext c; CUfunction k; };
static Ctx make(CUcontext c) { C(cuCtxSetCurrent(c)); CUmodule m; CUfunction f; C(cuModuleLoadData(&m, PTX)); C(cuModuleGetFunction(&f, m, "k")); return {c, f}; }
static void launch(const Ctx &x, CUstream s) { C(cuLaunchKernel(x.k, 1, 1, 1, 1, 1, 1, 0, s, nullptr, nullptr)); }
// From another thread, RELAXED: what the looks say.
static void look(CUcontext c, CUresult *rec, CUresult *query, CUresult *legacy, double *took = nullptr) {
    std::thread t([&] { C(cuCtxSetCurrent(c)); CUstreamCaptureMode m = CU_STREAM_CAPTURE_MODE_RELAXED; cuThreadExchangeStreamCaptureMode(&m); CUevent e; C(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING)); double b = now(); *rec = cuCtxRecordEvent(c, e); if (took) *took = now() - b; *query = *rec ? *rec : cuEventQuery(e); *legacy = cuStreamQuery(CU_STREAM_LEGACY); cuEventDestroy(e); });
    t.join();
}
static void streams_destroyed(const char *name, const Ctx &x) {
    for (int flags = 0; flags < 2; flags++) {
        C(cuCtxSetCurrent(x.c)); CUstream s; C(cuStreamCreate(&s, flags)); launch(x, s); C(cuStreamSynchronize(s));
        hold = 1; C(cuLaunchHostFunc(s, held, nullptr)); launch(x, s); ms(5); CUresult a, b, l;
        double t = now(); C(cuStreamDestroy(s)); t = now() - t; look(x.c, &a, &b, &l);
        printf("%s, %s stream destroyed with work in flight (destroy took %.3f ms): ctx event %s then %s, query of legacy %s\n", name, flags ? "non-blocking" : "blocking", t * 1e3, R(a), R(b), R(l)); hold = 0; C(cuCtxSynchronize());
        look(x.c, &a, &b, &l); printf("   after its end: %s then %s, legacy %s\n", R(a), R(b), R(l));
    }
    fflush(stdout);
}
int main() {
    C(cuInit(0)); CUdevice d; C(cuDeviceGet(&d, 0)); CUcontext p, u; C(cuDevicePrimaryCtxRetain(&p, d)); C(cuCtxCreate(&u, nullptr, 0, d));
    Ctx P = make(p), U = make(u);
    for (auto &x : {P, U}) { C(cuCtxSetCurrent(x.c)); launch(x, 0); C(cuLaunchHostFunc(0, nothing, nullptr)); C(cuCtxSynchronize()); }
    streams_destroyed("primary", P); streams_destroyed("created context", U);
    // Contexts do not see each other's work.
    { C(cuCtxSetCurrent(u)); CUstream s; C(cuStreamCreate(&s, 1)); launch(U, s); C(cuStreamSynchronize(s)); hold = 1; C(cuLaunchHostFunc(s, held, nullptr)); ms(3); CUresult a, b, l; look(p, &a, &b, &l); printf("work in a created context, looks at the primary: ctx event %s then %s, legacy %s\n", R(a), R(b), R(l)); hold = 0; C(cuCtxSynchronize()); C(cuStreamDestroy(s)); }
    // A capture in one context, a context event on the other.
    for (int mode = 0; mode < 3; mode++) for (int flags = 0; flags < 2; flags++) for (int which = 0; which < 2; which++) {
        const Ctx &x = which ? P : U, &y = which ? U : P; C(cuCtxSetCurrent(x.c)); CUstream s; C(cuStreamCreate(&s, flags)); launch(x, s); C(cuStreamSynchronize(s)); C(cuStreamBeginCapture(s, (CUstreamCaptureMode)mode)); launch(x, s); CUresult a, b, l; look(y.c, &a, &b, &l);
        CUresult again = cuLaunchKernel(x.k, 1, 1, 1, 1, 1, 1, 0, s, nullptr, nullptr); CUgraph g = nullptr; CUresult e = cuStreamEndCapture(s, &g); printf("capture (mode %d, %s) in the %s, looks at the other: ctx event %s then %s, legacy %s; capture: launch %s, end %s\n", mode, flags ? "non-blocking" : "blocking", which ? "primary" : "created context", R(a), R(b), R(l), R(again), R(e)); if (g) cuGraphDestroy(g); C(cuStreamDestroy(s));
    }
    fflush(stdout);
    // Events without a current context; a current context that another thread destroys.
    { C(cuCtxSetCurrent(p)); CUevent e; C(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING)); C(cuCtxRecordEvent(p, e)); C(cuCtxSynchronize()); std::thread t([&] { CUresult q = cuEventQuery(e); CUcontext c = (CUcontext)1; CUresult g = cuCtxGetCurrent(&c); CUresult x = cuEventDestroy(e); printf("thread without a context: event query %s, destroy %s (current %s %p)\n", R(q), R(x), R(g), c); }); t.join(); }
    { CUcontext w; C(cuCtxCreate(&w, nullptr, 0, d)); Ctx W = make(w); CUevent e; C(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING)); launch(W, 0); C(cuEventRecord(e, 0)); std::atomic<int> step{0}; std::thread t([&] { C(cuCtxSetCurrent(w)); step = 1; while (step != 2) ms(1); CUresult s = cuCtxSynchronize(); CUdevice dd; CUresult g = cuCtxGetDevice(&dd); CUstreamCaptureMode m = CU_STREAM_CAPTURE_MODE_RELAXED; CUresult x = cuThreadExchangeStreamCaptureMode(&m); CUresult n = cuCtxSetCurrent(p); CUresult z = cuCtxSynchronize(); printf("thread whose context was destroyed elsewhere: synchronise %s, device %s, exchange mode %s, set another %s, synchronise %s\n", R(s), R(g), R(x), R(n), R(z)); }); while (step != 1) ms(1); C(cuCtxDestroy(w)); step = 2; t.join(); }
    // A full queue: does the look wait for room in it?
    for (int flags = 0; flags < 2; flags++) {
        C(cuCtxSetCurrent(p)); CUstream s; C(cuStreamCreate(&s, flags)); launch(P, s); C(cuStreamSynchronize(s)); hold = 1; C(cuLaunchHostFunc(s, held, nullptr)); std::atomic<int> n{0}; std::thread t([&] { C(cuCtxSetCurrent(p)); for (int i = 0; i < 6000; i++) { launch(P, s); n++; } }); ms(300); int at = n; CUresult a, b, l; double took = -1;
        std::thread u([&] { look(p, &a, &b, &l, &took); }); ms(300); double before = took; hold = 0; u.join(); t.join(); printf("%s stream, queue held with %d of 6000 launches in it: ctx event %s after %.3f ms (%s)\n", flags ? "non-blocking" : "blocking", at, R(a), took * 1e3, before < 0 ? "WAITED for the queue" : "did not wait"); C(cuCtxSynchronize()); C(cuStreamDestroy(s));
    }
    fflush(stdout);
    // Green contexts.
    { C(cuCtxSetCurrent(p)); CUdevResource all, part[1]; unsigned n = 1; C(cuDeviceGetDevResource(d, &all, CU_DEV_RESOURCE_TYPE_SM)); C(cuDevSmResourceSplitByCount(part, &n, &all, nullptr, 0, 16)); CUdevResourceDesc desc; C(cuDevResourceGenerateDesc(&desc, part, 1)); CUgreenCtx g; C(cuGreenCtxCreate(&g, desc, d, CU_GREEN_CTX_DEFAULT_STREAM)); CUcontext gc; C(cuCtxFromGreenCtx(&gc, g)); CUstream s; C(cuGreenCtxStreamCreate(&s, g, CU_STREAM_NON_BLOCKING, 0));
      Ctx G = make(gc); launch(G, s); C(cuLaunchHostFunc(s, nothing, nullptr)); C(cuStreamSynchronize(s)); CUcontext of = nullptr; CUresult oc = cuStreamGetCtx(s, &of); printf("green: its context %p, primary %p, context of its stream %s %p\n", gc, p, R(oc), of);
      hold = 1; C(cuLaunchHostFunc(s, held, nullptr)); ms(3); CUresult a, b, l; look(p, &a, &b, &l); printf("work on a green context's stream, looks at the primary: ctx event %s then %s, legacy %s\n", R(a), R(b), R(l)); look(gc, &a, &b, &l); printf("   looks at the green context's own: %s then %s, legacy %s\n", R(a), R(b), R(l)); C(cuStreamDestroy(s)); look(p, &a, &b, &l); printf("   after its stream was destroyed, primary: %s then %s; ", R(a), R(b)); look(gc, &a, &b, &l); printf("green: %s then %s\n", R(a), R(b)); hold = 0; C(cuCtxSetCurrent(p)); C(cuCtxSynchronize());
      C(cuCtxSetCurrent(gc)); hold = 1; C(cuLaunchHostFunc(0, held, nullptr)); ms(3); look(p, &a, &b, &l); printf("work on the green context's null stream, primary: %s then %s, legacy %s; ", R(a), R(b), R(l)); look(gc, &a, &b, &l); printf("green: %s then %s, legacy %s\n", R(a), R(b), R(l)); hold = 0; C(cuCtxSynchronize()); C(cuCtxSetCurrent(p)); C(cuGreenCtxDestroy(g)); }
    fflush(stdout);
    // Costs.
    C(cuCtxSetCurrent(p)); CUevent e; C(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
    for (int count : {1, 8, 32, 128}) { std::vector<CUstream> s(count); for (auto &x : s) { C(cuStreamCreate(&x, 1)); launch(P, x); } C(cuCtxSynchronize()); double t = now(); for (int i = 0; i < 1000; i++) C(cuCtxRecordEvent(p, e)); double rec = (now() - t) * 1e3; C(cuCtxSynchronize()); t = now(); for (int i = 0; i < 1000; i++) C(cuEventRecord(e, s[0])); double ev = (now() - t) * 1e3; t = now(); for (int i = 0; i < 1000; i++) cuStreamQuery(CU_STREAM_LEGACY); double q = (now() - t) * 1e3; C(cuCtxSynchronize()); t = now(); for (int i = 0; i < 1000; i++) { CUevent f; cuEventCreate(&f, CU_EVENT_DISABLE_TIMING); cuEventDestroy(f); } double cr = (now() - t) * 1e3; printf("%d streams: cuCtxRecordEvent %.2f us, cuEventRecord %.2f, query of legacy %.2f, event create+destroy %.2f\n", count, rec, ev, q, cr); for (auto x : s) cuStreamDestroy(x); }
    { double t = now(); for (int i = 0; i < 1000; i++) { cuCtxSetCurrent(p); cuCtxSetCurrent(u); } printf("two cuCtxSetCurrent %.2f us; ", (now() - t) * 1e3); C(cuCtxSetCurrent(p)); CUcontext c; t = now(); for (int i = 0; i < 1000; i++) cuCtxGetCurrent(&c); printf("cuCtxGetCurrent %.3f us; ", (now() - t) * 1e3); CUstreamCaptureMode m = CU_STREAM_CAPTURE_MODE_RELAXED; t = now(); for (int i = 0; i < 1000; i++) cuThreadExchangeStreamCaptureMode(&m); printf("exchange %.3f us\n", (now() - t) * 1e3); }
}
