// Does moving managed memory wait for a host function that is running on another stream? A host function holds stream A (blocking or not); meanwhile another thread, on
// a non-blocking stream of its own, prefetches managed memory to the card and to the host, in one piece and in several, waiting for each or only at the end.
// Prints what was done within 0.5 s while the function was held. nvcc -std=c++17 -arch=sm_90 prefetch_probe.cu -o prefetch_probe -lcuda && ./prefetch_probe
#include <cuda.h>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#define C(x) do { CUresult err_ = (x); if (err_) { printf("error %d at line %d: %s\n", err_, __LINE__, #x); fflush(stdout); exit(1); } } while (0)
static std::atomic<int> hold{0};
static void CUDA_CB held(void *) { while (hold.load()) std::this_thread::sleep_for(std::chrono::microseconds(50)); }
static void ms(int n) { std::this_thread::sleep_for(std::chrono::milliseconds(n)); }
static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
int main() {
    C(cuInit(0)); CUdevice d; C(cuDeviceGet(&d, 0)); CUcontext p; C(cuDevicePrimaryCtxRetain(&p, d)); C(cuCtxSetCurrent(p));
    CUstream ours; C(cuStreamCreate(&ours, 1)); CUdeviceptr m; size_t size = 1ull << 30; C(cuMemAllocManaged(&m, size, CU_MEM_ATTACH_GLOBAL)); CUmemLocation card = {CU_MEM_LOCATION_TYPE_DEVICE, 0}, host = {CU_MEM_LOCATION_TYPE_HOST, 0}; C(cuMemPrefetchAsync(m, size, card, 0, ours)); C(cuStreamSynchronize(ours));
    for (int blocking = 0; blocking < 2; blocking++) for (int to_host = 0; to_host < 2; to_host++) for (int pieces : {1, 4}) for (int each = 0; each < 2; each++) {
        // The memory starts on the other side.
        C(cuMemPrefetchAsync(m, size, to_host ? card : host, 0, ours)); C(cuStreamSynchronize(ours));
        CUstream a; C(cuStreamCreate(&a, blocking ? 0 : 1)); hold = 1; C(cuLaunchHostFunc(a, held, nullptr)); ms(5);
        std::atomic<int> calls{0}, waits{0}; double called = -1, waited = -1, begin = now();
        std::thread t([&] { C(cuCtxSetCurrent(p)); for (int i = 0; i < pieces; i++) { C(cuMemPrefetchAsync(m + i * (size / pieces), size / pieces, to_host ? host : card, 0, ours)); calls++; if (each) { C(cuStreamSynchronize(ours)); waits++; } } called = now() - begin; C(cuStreamSynchronize(ours)); waited = now() - begin; });
        ms(500); int c = calls, w = waits; double cd = called, wd = waited; hold = 0; t.join();
        printf("%s stream held, 1 GiB to the %s in %d pieces, waiting %s: %d calls returned%s, %d waits; %s (%.3f s)\n", blocking ? "blocking" : "non-blocking", to_host ? "host" : "card", pieces, each ? "for each" : "at the end", c, cd >= 0 ? "" : " (BLOCKED)", w, wd >= 0 ? "all done while it was held" : "NOT DONE until it ended", wd >= 0 ? wd : waited);
        C(cuStreamDestroy(a));
    }
    // An allocation of each kind, a free, an event and a query, while a function is held.
    CUstream a; C(cuStreamCreate(&a, 0)); hold = 1; C(cuLaunchHostFunc(a, held, nullptr)); ms(5); const char *what[] = {"cuMemAllocManaged", "prefetch of fresh memory", "cuMemAlloc", "cuMemAllocAsync", "cuCtxRecordEvent", "cuStreamCreate", "cuMemFree (managed)", "cuMemFree (plain)"};
    static double took[8]; for (auto &x : took) x = -1;
    CUdeviceptr q = 0, r = 0; std::thread *t[8]; double begin = now();
    std::thread seq([&] { C(cuCtxSetCurrent(p)); CUevent e; C(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING)); CUdeviceptr s; CUstream n; for (int i = 0; i < 8; i++) { double b = now(); switch (i) { case 0: C(cuMemAllocManaged(&q, 64 << 20, CU_MEM_ATTACH_GLOBAL)); break; case 1: C(cuMemPrefetchAsync(q, 64 << 20, card, 0, ours)); break; case 2: C(cuMemAlloc(&r, 64 << 20)); break; case 3: C(cuMemAllocAsync(&s, 64 << 20, ours)); break; case 4: C(cuCtxRecordEvent(p, e)); break; case 5: C(cuStreamCreate(&n, 1)); break; case 6: C(cuMemFree(q)); break; case 7: C(cuMemFree(r)); break; } took[i] = now() - b; } });
    ms(1000); for (int i = 0; i < 8; i++) { if (took[i] >= 0) printf("%s while a function is held: %.3f ms\n", what[i], took[i] * 1e3); else { printf("%s while a function is held: BLOCKED (and what follows was not tried)\n", what[i]); break; } } hold = 0; seq.join(); (void)t; (void)begin;
}
