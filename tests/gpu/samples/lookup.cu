// Every door to the driver: dlopen and dlsym, dlvsym, the default scope, cudaGetDriverEntryPoint, cuGetProcAddress with versions
// and stream flags. An interposer that misses one of them sees an allocation without its free, or a launch without its gate.
#include "check.h"
#include <cudaTypedefs.h>
#include <dlfcn.h>
static void *library() { void *l = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL); WANT(l); return l; }
template <class F> static F from(void *where, const char *n) { auto f = (F)dlsym(where, n); if (!f) fail(__LINE__, n, "not found"); return f; }
using Init = CUresult (*)(unsigned); using Create = CUresult (*)(CUcontext *, unsigned, CUdevice); using Alloc = CUresult (*)(CUdeviceptr *, size_t);
using Free = CUresult (*)(CUdeviceptr); using Set = CUresult (*)(CUdeviceptr, unsigned, size_t); using Get = CUresult (*)(void *, CUdeviceptr, size_t);
using Proc = CUresult (*)(const char *, void **, int, cuuint64_t);
using Proc2 = CUresult (*)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);
static void work(Alloc alloc, Free free, Set set, Get get) {
    for (size_t n : {size_t(1000), 4 * MiB}) { CUdeviceptr p; WANT(!alloc(&p, n)); WANT(!set(p, 7, n / 4)); std::vector<unsigned> h(n / 4);
    WANT(!get(h.data(), p, n / 4 * 4)); for (auto x : h) WANT(x == 7); WANT(!free(p)); }
}

CASE(by_dlsym) {
    auto l = library(); CUcontext c; WANT(!from<Init>(l, "cuInit")(0)); WANT(!from<Create>(l, "cuCtxCreate_v2")(&c, 0, 0));
    work(from<Alloc>(l, "cuMemAlloc_v2"), from<Free>(l, "cuMemFree_v2"), from<Set>(l, "cuMemsetD32_v2"), from<Get>(l, "cuMemcpyDtoH_v2"));
    work(from<Alloc>(l, "cuMemAlloc_v2"), from<Free>(l, "cuMemFree_v2"), from<Set>(l, "cuMemsetD32_v2_ptds"), from<Get>(l, "cuMemcpyDtoH_v2_ptds"));
    WANT(!dlsym(l, "cuNoSuchThing")); printf("error %d\n", dlerror() != nullptr); WANT(!dlclose(l)); auto again = library(); printf("same %d\n", again == l);
    WANT(!from<CUresult (*)(CUcontext)>(again, "cuCtxDestroy_v2")(c));
}
CASE(global_scope) {
    CHECK(cudaFree(0)); WANT(dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL));
    work(from<Alloc>(RTLD_DEFAULT, "cuMemAlloc_v2"), from<Free>(RTLD_DEFAULT, "cuMemFree_v2"), from<Set>(RTLD_DEFAULT, "cuMemsetD32_v2"), from<Get>(RTLD_DEFAULT, "cuMemcpyDtoH_v2"));
}
CASE(before_init) {
    auto l = library(); CUdeviceptr p; size_t a, b; int n = -1; printf("%d ", from<Alloc>(l, "cuMemAlloc_v2")(&p, 100));
    printf("%d ", from<CUresult (*)(size_t *, size_t *)>(l, "cuMemGetInfo_v2")(&a, &b)); printf("%d ", from<CUresult (*)(int *)>(l, "cuDeviceGetCount")(&n));
    printf("%d ", from<CUresult (*)(int *)>(l, "cuDriverGetVersion")(&n)); printf("%d\n", from<Init>(l, "cuInit")(1)); WANT(!from<Init>(l, "cuInit")(0));
    printf("%d\n", from<Alloc>(l, "cuMemAlloc_v2")(&p, 100));
}
CASE(other_names) {
    for (auto n : {"libcuda.so.1", "libcuda.so"}) { auto l = dlopen(n, RTLD_LAZY); printf("%s %d\n", n, l != nullptr); } auto l = library();
    auto loaded = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD); printf("%d\n", loaded == l); Dl_info i;
    printf("%d\n", dladdr((void *)from<Init>(l, "cuInit"), &i) != 0);
}
CASE(proc_address) {
    auto l = library(); WANT(!from<Init>(l, "cuInit")(0)); CUcontext c; WANT(!from<Create>(l, "cuCtxCreate_v2")(&c, 0, 0));
    auto get = from<Proc2>(l, "cuGetProcAddress_v2"); auto get1 = from<Proc>(l, "cuGetProcAddress"); CUdriverProcAddressQueryResult st;
    auto one = [&](const char *n, int v, cuuint64_t f) { void *p = nullptr; auto r = get(n, &p, v, f, &st);
    printf("%s %d flags %d: %d status %d found %d\n", n, v, int(f), r, st, p != nullptr); return p; };
    for (cuuint64_t f : {0, 1, 2}) work((Alloc)one("cuMemAlloc", 13000, f), (Free)one("cuMemFree", 13000, f), (Set)one("cuMemsetD32", 13000, f), (Get)one("cuMemcpyDtoH", 13000, f));
    work((Alloc)one("cuMemAlloc", 3020, 0), (Free)one("cuMemFree", 3020, 0), (Set)one("cuMemsetD32", 3020, 0), (Get)one("cuMemcpyDtoH", 3020, 0));
    one("cuMemAlloc", 2000, 0); one("cuMemAlloc_v2", 13000, 0); one("cuMemAllocAsync", 11000, 0); one("cuMemAllocAsync", 11020, 0);
    one("cuNoSuchThing", 13000, 0); one("", 13000, 0); one("cuCtxCreate", 11040, 0); one("cuCtxCreate", 13000, 0); one("cuGetProcAddress", 11030, 0);
    one("cuGetProcAddress", 12000, 0); one("cuStreamBeginCapture", 10000, 2); one("cuGraphInstantiate", 13000, 0); one("cuMemAlloc", 99000, 0);
    one("cuMemAlloc", 13000, 7); one("cuMemAlloc", -1, 0); void *p; printf("%d\n", get1("cuMemAlloc", &p, 11030, 0));
    printf("%d %d\n", get(nullptr, &p, 13000, 0, &st), get("cuMemAlloc", nullptr, 13000, 0, &st)); printf("%d\n", get("cuMemAlloc", &p, 13000, 0, nullptr));
    auto inner = (Proc2)one("cuGetProcAddress", 12000, 0); void *q; WANT(!inner("cuMemAlloc", &q, 13000, 0, &st)); WANT(!inner("cuMemFree", &p, 13000, 0, &st));
    CUdeviceptr d; WANT(!((Alloc)q)(&d, MiB) && !((Free)p)(d)); WANT(q == (void *)dlsym(l, "cuMemAlloc_v2"));
}
CASE(runtime_entry_point) {
    void *p; cudaDriverEntryPointQueryResult q;
    for (auto n : {"cuMemAlloc", "cuLaunchKernel", "cuMemAllocAsync", "cuNoSuchThing", "cuGetProcAddress", "cuMemGetInfo"}) for (unsigned v : {11000u, 12000u, 13000u}) for (unsigned long long f : {cudaEnableDefault, cudaEnableLegacyStream, cudaEnablePerThreadDefaultStream}) { p = nullptr;
    auto r = cudaGetDriverEntryPointByVersion(n, &p, v, f, &q); printf("%s %u %llu: %s %d %d\n", n, v, f, said(r), q, p != nullptr); } cudaGetLastError();
    void *a, *b, *s, *g; CHECK(cudaFree(0)); CHECK(cudaGetDriverEntryPointByVersion("cuMemAlloc", &a, 12000, 0, &q));
    CHECK(cudaGetDriverEntryPointByVersion("cuMemFree", &b, 12000, 0, &q)); CHECK(cudaGetDriverEntryPointByVersion("cuMemsetD32", &s, 12000, 0, &q));
    CHECK(cudaGetDriverEntryPointByVersion("cuMemcpyDtoH", &g, 12000, 0, &q)); work((Alloc)a, (Free)b, (Set)s, (Get)g);
}
CASE(mixed_doors) {
    CHECK(cudaFree(0)); auto l = library(); auto p = device<char>(8 * MiB); WANT(!from<Free>(l, "cuMemFree_v2")(CUdeviceptr(p))); CUdeviceptr d;
    WANT(!from<Alloc>(l, "cuMemAlloc_v2")(&d, 8 * MiB)); CHECK(cudaMemset((void *)d, 1, 8 * MiB)); CHECK(cudaFree((void *)d)); SAY(cudaFree((void *)d));
    cudaGetLastError();
}
CASE(error_names) {
    auto l = library();
    auto text = from<CUresult (*)(int, const char **)>(l, "cuGetErrorString"), name = from<CUresult (*)(int, const char **)>(l, "cuGetErrorName");
    for (int e : {0, 1, 2, 3, 100, 101, 200, 201, 214, 400, 600, 700, 710, 719, 801, 900, 901, 999, 12345}) { const char *a = "-", *b = "-";
    int r = name(e, &a), s = text(e, &b); printf("%d: %d %s %d %s\n", e, r, a ? a : "null", s, b ? b : "null"); }
    for (int e : {0, 2, 46, 100, 700, 99999}) printf("%s: %s\n", cudaGetErrorName(cudaError_t(e)), cudaGetErrorString(cudaError_t(e)));
}
