/* A libnvidia-ml.so.1 that knows one GPU of 1 GiB, half of which is used by others. A file `processes` beside the simulated
 * cards may name processes: in each line a process and its bytes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef unsigned long long u64;
struct process { unsigned pid; u64 used; };
struct process_v2 { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; };
struct detail { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; u64 protected_; };
struct details { unsigned version, mode, count; struct detail *list; };
struct memory { u64 total, free, used; };
struct memory_v2 { unsigned version; u64 total, reserved, free, used; };
/* While the process is off the card, a call of a card's NVML waits for ever: the driver suspends it as well. Here it ends the process. */
static void look(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    int (*state_of)(int, int *) = driver ? dlsym(driver, "cuCheckpointProcessGetState") : NULL, state = 0;
    if (state_of && state_of(getpid(), &state) == 0 && state == 2) { fprintf(stderr, "nvsim: NVML was called while the process is off the card\n"); _exit(1); }
}
int nvmlInit_v2(void) { look(); return 0; }
/* It waits while the file `event` is there, and says by another one that it does. */
int nvmlEventSetWait_v2(void *set, void *data, unsigned milliseconds) {
    char path[4096], says[4096];
    snprintf(path, sizeof path, "%s/event", getenv("NVSIM_DIR"));
    snprintf(says, sizeof says, "%s/event.waits", getenv("NVSIM_DIR"));
    while (access(path, F_OK) == 0) { close(creat(says, 0600)); usleep(1000); }
    look();
    return 0;
}
/* It looks at its arguments. */
int nvmlDeviceGetSamples(void *device, int type, u64 since, int *kind, unsigned *count, unsigned *samples) {
    look();
    if (device != (void *)16 || type != 3 || since != 1ull << 40 || *kind != 4 || *count != 5) return 2;
    *samples = 6;
    return 0;
}
int nvmlInternalGetExportTable(const void **table, const void *name) { look(); return 13; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { look(); *device = (void *)16; return index ? 2 : 0; }
int nvmlDeviceGetHandleByUUID(const char *text, void **device) { look(); *device = (void *)16; return strcmp(text, "GPU-51600000-0000-4000-8000-000000000000") ? 6 : 0; }
int nvmlDeviceGetUUID(void *device, char *text, unsigned length) { look(); strncpy(text, "GPU-51600000-0000-4000-8000-000000000000", length); return 0; }
int nvmlDeviceGetIndex(void *device, unsigned *index) { look(); *index = 0; return 0; }
int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) {
    look();
    if (!memory) return 2;
    *memory = (struct memory){1ull << 30, 1ull << 29, 1ull << 29};
    return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *memory) {
    look();
    if (!memory || memory->version != 0x2000028) return memory ? 25 : 2;
    *memory = (struct memory_v2){memory->version, 1ull << 30, 1 << 20, (1ull << 29) - (1 << 20), 1ull << 29};
    return 0;
}

/* Processes that are no clients compute and draw. */
static const struct process strangers[] = {{1, 5}, {2, 5}, {3, 5}};
static struct process listed[16];
static unsigned processes(const struct process **list) {
    char path[4096];
    snprintf(path, sizeof path, "%s/processes", getenv("NVSIM_DIR"));
    FILE *file = fopen(path, "r");
    if (!file) return *list = strangers, 3;
    unsigned n = 0;
    while (n < 16 && fscanf(file, "%u %llu", &listed[n].pid, &listed[n].used) == 2) n++;
    fclose(file);
    *list = listed;
    return n;
}
#define LIST(name, type) \
    int name(void *device, unsigned *count, type *list) { \
        look(); \
        if (!count) return 2; \
        const struct process *all; \
        unsigned room = *count, there = *count = processes(&all); \
        if (room < there) return 7; \
        for (unsigned i = 0; i < there; i++) list[i] = (type){.pid = all[i].pid, .used = all[i].used}; \
        return 0; \
    }
LIST(nvmlDeviceGetComputeRunningProcesses, struct process)
LIST(nvmlDeviceGetComputeRunningProcesses_v2, struct process_v2)
LIST(nvmlDeviceGetComputeRunningProcesses_v3, struct process_v2)
LIST(nvmlDeviceGetGraphicsRunningProcesses, struct process)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, struct process_v2)
LIST(list_details, struct detail)
int nvmlDeviceGetRunningProcessDetailList(void *device, struct details *details) {
    return details ? list_details(device, &details->count, details->list) : 2;
}
