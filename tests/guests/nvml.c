/* A libnvidia-ml.so.1 that knows one GPU of 1 GiB, half of which somebody uses. */
#include <string.h>
typedef unsigned long long u64;
struct memory { u64 total, free, used; };
struct memory_v2 { unsigned version; u64 total, reserved, free, used; };
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)16; return index ? 2 : 0; }
int nvmlDeviceGetUUID(void *device, char *text, unsigned length) { strncpy(text, "GPU-51600000-0000-4000-8000-000000000000", length); return 0; }
int nvmlDeviceGetIndex(void *device, unsigned *index) { *index = 0; return 0; }
int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) {
    if (!memory) return 2;
    *memory = (struct memory){1ull << 30, 1ull << 29, 1ull << 29};
    return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *memory) {
    if (!memory || memory->version != 0x2000028) return memory ? 25 : 2;
    *memory = (struct memory_v2){memory->version, 1ull << 30, 1 << 20, (1ull << 29) - (1 << 20), 1ull << 29};
    return 0;
}
