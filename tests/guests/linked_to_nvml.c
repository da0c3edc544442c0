/* A library that is linked to functions of NVML, with a hook and without. */
int nvmlDeviceGetMemoryInfo(void *, void *);
int nvmlDeviceGetIndex(void *, unsigned *);
int look(void *device, void *memory, unsigned *index) { return nvmlDeviceGetMemoryInfo(device, memory) | nvmlDeviceGetIndex(device, index); }
