// What the end of a context costs the thread that ends it: context_cost SAMPLES SECONDS [GIB 1]. It ends when it has so many samples, or after so long.
// The contexts come in batches of four, each with 64 MiB that a fill has used, beside GIB of the primary context. Half of the batches end at once, and half after a pause
// of up to 400 ms, in which another client may get the card and this one's memory leaves. Prints what each end took in us: {"at_once": [...], "later": [...]}
#include <cuda.h>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>
#define C(x) do { int e_ = (int)(x); if (e_) { printf("error %d at %s\n", e_, #x); exit(1); } } while (0)
// Headers of CUDA 13 declare other versions of it alone.
#undef cuCtxCreate_v2
extern "C" CUresult CUDAAPI cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
int main(int c, char **v) {
    size_t samples = c > 1 ? atoi(v[1]) : 50, bytes = (size_t)((c > 3 ? atof(v[3]) : 1) * (1 << 30)), part = 64 << 20; double seconds = c > 2 ? atof(v[2]) : 10;
    CUdevice d; CUcontext mine, of[4]; CUdeviceptr all, p; std::vector<double> took[2]; std::mt19937 random(samples);
    C(cuInit(0)); C(cuDeviceGet(&d, 0)); C(cuDevicePrimaryCtxRetain(&mine, d)); C(cuCtxSetCurrent(mine)); C(cuMemAlloc(&all, bytes));
    double begin = now();
    for (int batch = 0; took[0].size() + took[1].size() < samples && now() - begin < seconds; batch++) {
        C(cuMemsetD8(all, batch, bytes)); C(cuCtxSynchronize());
        for (auto &one : of) {
            C(cuCtxCreate_v2(&one, 0, d));
            C(cuMemAlloc(&p, part)); C(cuMemsetD8(p, 1, part)); C(cuCtxSynchronize());
        }
        C(cuCtxSetCurrent(mine));
        for (auto one : of) {
            if (batch % 2) std::this_thread::sleep_for(std::chrono::milliseconds(random() % 100));
            double at = now(); C(cuCtxDestroy(one)); took[batch % 2].push_back((now() - at) * 1e6);
        }
    }
    const char *name[] = {"at_once", "later"}; printf("{");
    for (int i = 0; i < 2; i++) { printf("%s\"%s\": [", i ? ", " : "", name[i]); for (size_t k = 0; k < took[i].size(); k++) printf("%s%.0f", k ? ", " : "", took[i][k]); printf("]"); }
    printf("}\n");
}
