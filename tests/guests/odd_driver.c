/* A driver whose calls can wait until the thread is cancelled, in a cancellation point with the library's hook below it, and
   can return codes that no driver has returned yet. It has a function of tomorrow, and a new version of one of today. */
#include <stdint.h>
#include <string.h>
#include <unistd.h>
static volatile int stuck, inside, answer;
void odd_waits(int yes) { stuck = yes; }
int odd_inside(void) { return inside; }
void odd_answers(int code) { answer = code; }
static int call(void) {
    if (stuck) __sync_fetch_and_add(&inside, 1);
    while (stuck) pause();
    return answer;
}
static int give(uint64_t *place) {
    static uint64_t next = 1ul << 40;
    int result = call();
    if (!result) *place = __sync_fetch_and_add(&next, 1 << 20);
    return result;
}
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = 0, 0; }
int cuDeviceGetUuid(char *uuid, int device) { return memset(uuid, 7, 16), 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = 1ul << 40, 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { return *value = 1, 0; }
int cuCtxGetCurrent(uint64_t *context) { return *context = 16, 0; }
int cuCtxGetDevice(int *device) { return *device = 0, 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) { return 0; }
int cuMemAllocManaged(uint64_t *base, size_t bytes, unsigned flags) { return give(base); }
int cuMemAllocAsync(uint64_t *base, size_t bytes, void *stream) { return give(base); }
int cuMemFree_v2(uint64_t base) { return call(); }
int cuMemAlloc_v2(uint64_t *base, size_t bytes) { return give(base); }
int cuMemGetInfo_v2(size_t *left, size_t *total) { return *left = *total = 1ul << 40, 0; }
int cuMemPrefetchAsync(uint64_t base, size_t bytes, int device, void *stream) { return 0; }
int cuStreamCreate(uint64_t *stream, unsigned flags) { return *stream = 0x2000, 0; }
int cuStreamSynchronize(void *stream) { return call(); }
int cuMemFreeAsync(uint64_t base, void *stream) { return call(); }
int cuMemCreate(uint64_t *handle, size_t bytes, void *properties, unsigned long flags) { return give(handle); }
int cuMemRelease(uint64_t handle) { return call(); }
int cuArray3DCreate_v2(uint64_t *array, void *shape) { return give(array); }
int cuArrayDestroy(uint64_t array) { return call(); }
int cuMemAllocPitch_v2(uint64_t *base, size_t *pitch, size_t width, size_t height, unsigned element) { return *pitch = width, give(base); }
int cuLaunchKernelEx(void *config, void *f, void **params, void **extra) { return call(); }
int cuLaunchHostFunc(void *stream, void *function, void *data) { return call(); }
int cuGraphLaunch(void *exec, void *stream) { return call(); }
int cuPointerGetAttribute(void *data, int attribute, uint64_t pointer) { return call(); }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) { return call(); }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **params, void **extra) { return call(); }
int cuLaunchTomorrow(void *stream) { return call(); }
int cuMemFreeAsync_v9(uint64_t base, void *stream, unsigned how) { return call(); }
int cuGetProcAddress_v2(const char *name, void **place, int version, uint64_t flags, int *status) {
    static const struct { const char *name; void *function; } KNOWN[] = {{"cuLaunchKernel", cuLaunchKernel}, {"cuLaunchTomorrow", cuLaunchTomorrow}, {"cuMemFreeAsync", cuMemFreeAsync_v9}};
    for (unsigned i = 0; i < sizeof KNOWN / sizeof *KNOWN; i++)
        if (!strcmp(name, KNOWN[i].name)) {
            if (status) *status = 0;
            return *place = KNOWN[i].function, 0;
        }
    if (status) *status = 1;
    return *place = 0, 500;
}
int cuGetProcAddress(const char *name, void **place, int version, uint64_t flags) { return cuGetProcAddress_v2(name, place, version, flags, 0); }
