/* Another preloaded library, which stands before a function of NVML and passes calls on to the next one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
int nvmlDeviceGetMemoryInfo(void *device, void *memory) {
    int (*next)(void *, void *) = dlsym(RTLD_NEXT, "nvmlDeviceGetMemoryInfo");
    puts("passed on");
    return next ? next(device, memory) : 13;
}
