// What a program asks about the card before it works: attributes, limits, flags, peers, the profiler. An interposer that hooks a
// look-up has to hand on every answer; with no memory limit nothing here differs.
#include "check.h"
#include <dlfcn.h>
extern "C" { cudaError_t cudaProfilerStart(); cudaError_t cudaProfilerStop(); }  // their header does not come with every compiler
CASE(attributes) {
    CHECK(cuInit(0)); for (int a = 1; a < 160; a++) { if (a == 13 || a == 36 || a == 33 || a == 34 || a == 50) continue; int v = -1;
    auto r = cuDeviceGetAttribute(&v, CUdevice_attribute(a), 0); if (r == CUDA_SUCCESS) printf("%d: %d\n", a, v); else printf("%d: %s\n", a, said(r)); }
}
CASE(properties) {
    cudaDeviceProp p; CHECK(cudaGetDeviceProperties(&p, 0));
    printf("%s %d.%d %d multiprocessors, managed %d concurrent %d pageable %d unified %d async engines %d pools %d ipc events %d\n", p.name, p.major, p.minor, p.multiProcessorCount, p.managedMemory, p.concurrentManagedAccess, p.pageableMemoryAccess, p.unifiedAddressing, p.asyncEngineCount, p.memoryPoolsSupported, p.ipcEventSupported);
    size_t free, total, all; CHECK(cudaMemGetInfo(&free, &total)); CHECK(cuDeviceTotalMem(&all, 0)); WANT(free <= total && total <= all);
    printf("the properties' total is the driver's: %d, and that of cudaMemGetInfo: %d\n", p.totalGlobalMem == all, p.totalGlobalMem == total); int n, c;
    CHECK(cudaGetDeviceCount(&n)); cudaDeviceProp want{}; want.major = 6; CHECK(cudaChooseDevice(&c, &want)); printf("%d\n", c);
}
CASE(identity) {
    char id[32]; int d = -1; CHECK(cudaDeviceGetPCIBusId(id, 32, 0)); CHECK(cudaDeviceGetByPCIBusId(&d, id)); printf("%d\n", d);
    SAY(cudaDeviceGetByPCIBusId(&d, "ffff:ff:ff.0")); SAY(cudaDeviceGetByPCIBusId(&d, "nonsense")); cudaGetLastError(); CUuuid a; CHECK(cuDeviceGetUuid(&a, 0));
    cudaDeviceProp p; CHECK(cudaGetDeviceProperties(&p, 0)); WANT(!memcmp(&a, &p.uuid, 16)); char n[100]; CHECK(cuDeviceGetName(n, 100, 0));
    WANT(!strcmp(n, p.name)); CHECK(cuDeviceGetName(n, 5, 0)); puts(n); int v, r; CHECK(cudaDriverGetVersion(&v)); CHECK(cudaRuntimeGetVersion(&r));
    printf("%d %d\n", v, r);
}
CASE(limits) {
    for (int l = 0; l < 9; l++) { size_t v = 0; auto r = cudaDeviceGetLimit(&v, cudaLimit(l)); printf("%d: %s %zu\n", l, said(r), r ? 0 : v); }
    cudaGetLastError(); for (int l : {0, 1, 2, 4, 5, 6}) { printf("%d: ", l); SAY(cudaDeviceSetLimit(cudaLimit(l), 65536)); size_t v = 0;
    cudaDeviceGetLimit(&v, cudaLimit(l)); printf("  %zu\n", v); } cudaGetLastError();
}
CASE(flags) {
    SAY(cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync | cudaDeviceMapHost)); unsigned f; CHECK(cudaGetDeviceFlags(&f)); printf("%x\n", f);
    SAY(cudaInitDevice(0, cudaDeviceScheduleYield, cudaInitDeviceFlagsAreValid)); CHECK(cudaGetDeviceFlags(&f)); printf("%x\n", f);
    SAY(cudaSetDeviceFlags(cudaDeviceScheduleSpin)); SAY(cudaSetDeviceFlags(0xffff)); cudaGetLastError(); spin<<<1, 1>>>(1000000);
    CHECK(cudaDeviceSynchronize()); SAY(cudaDeviceSetCacheConfig(cudaFuncCachePreferShared)); cudaFuncCache c; CHECK(cudaDeviceGetCacheConfig(&c));
    printf("%d\n", c);
}
CASE(peers_of_one) {
    int v; SAY(cudaDeviceCanAccessPeer(&v, 0, 0)); printf("%d\n", v); SAY(cudaDeviceEnablePeerAccess(0, 0)); SAY(cudaDeviceDisablePeerAccess(0));
    SAY(cudaDeviceGetP2PAttribute(&v, cudaDevP2PAttrAccessSupported, 0, 0)); SAY(cudaDeviceCanAccessPeer(&v, 0, 99)); cudaGetLastError();
}
CASE(profiler) { CHECK(cudaProfilerStart()); auto p = device(MiB); fill<<<64, 256>>>(p, MiB, 1); CHECK(cudaProfilerStop()); WANT(!wrong_on_device(p, MiB, 1)); }
CASE(valid_devices) {
    int zero = 0, bad[] = {99}; SAY(cudaSetValidDevices(&zero, 1)); SAY(cudaSetValidDevices(bad, 1)); cudaGetLastError(); CHECK(cudaFree(0)); int d;
    CHECK(cudaGetDevice(&d)); printf("%d\n", d);
}
CASE(hidden) {
    if (args.empty()) { setenv("CUDA_VISIBLE_DEVICES", "", 1); fflush(stdout); execl("/proc/self/exe", "x", "hidden", "again", nullptr); } int n = -1;
    SAY(cudaGetDeviceCount(&n)); printf("%d\n", n); void *p; SAY(cudaMalloc(&p, 4)); SAY(cuInit(0));
}
CASE(launch_blocking) {
    if (args.empty()) { setenv("CUDA_LAUNCH_BLOCKING", "1", 1); fflush(stdout); execl("/proc/self/exe", "x", "launch_blocking", "again", nullptr); }
    auto p = device(MiB); for (int i = 0; i < 20; i++) { fill<<<64, 256>>>(p, MiB, i); WANT(cudaStreamQuery(0) == cudaSuccess); }
    WANT(!wrong_on_device(p, MiB, 19));
}
CASE(eager_loading) {
    if (args.empty()) { setenv("CUDA_MODULE_LOADING", "EAGER", 1); setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1); fflush(stdout);
    execl("/proc/self/exe", "x", "eager_loading", "again", nullptr); } CUmoduleLoadingMode m; CHECK(cuInit(0)); CHECK(cuModuleGetLoadingMode(&m));
    printf("%d\n", m); auto p = device(MiB); fill<<<64, 256>>>(p, MiB, 1); WANT(!wrong_on_device(p, MiB, 1));
}
CASE(memory_seen_by_nvml) {  // alone on the card: NVML's total is the driver's or above it, and an allocation is seen
    auto l = dlopen("libnvidia-ml.so.1", RTLD_NOW); if (!l) skip("no NVML"); struct { unsigned long long total, free, used; } a, b; void *d;
    WANT(!((int (*)())dlsym(l, "nvmlInit_v2"))()); char id[32]; CHECK(cudaDeviceGetPCIBusId(id, 32, 0));
    WANT(!((int (*)(const char *, void **))dlsym(l, "nvmlDeviceGetHandleByPciBusId_v2"))(id, &d));
    auto info = (int (*)(void *, void *))dlsym(l, "nvmlDeviceGetMemoryInfo"); CHECK(cudaFree(0)); WANT(!info(d, &a)); auto p = device<char>(GiB);
    CHECK(cudaMemset(p, 1, GiB)); CHECK(cudaDeviceSynchronize()); WANT(!info(d, &b));
    WANT(b.used >= a.used + GiB - MiB && b.used < a.used + GiB + 64 * MiB && a.total == b.total);
}
