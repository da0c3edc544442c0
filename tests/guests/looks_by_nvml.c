/* The habits of nvidia-smi, which never initialises CUDA. The program shows first the memory use of a relative, then its own.
   */
#include "guest.h"
struct memory { uint64_t total, free, used; };
struct memory_v2 { unsigned version; uint64_t total, reserved, free, used; };
struct process { unsigned pid; uint64_t used; };
struct process_v2 { unsigned pid; uint64_t used; unsigned gpu_instance, compute_instance; };
struct detail { unsigned pid; uint64_t used; unsigned gpu_instance, compute_instance; uint64_t protected_; };
struct details { unsigned version, mode, count; struct detail *list; };
static struct memory memory;
/* One process of the tenant computes and none draws, in every list; other processes of the machine are not shown. */
static void look_for_processes(void *nvml, void *device, unsigned pid, uint64_t used) {
    struct process v1[4];
    struct process_v2 v2[4];
    struct detail detail[4];
    struct details details = {.version = 0x1000018, .mode = 0, .count = 4, .list = detail};
    unsigned count = 0;
    int (*v1_of)() = dlsym(nvml, "nvmlDeviceGetComputeRunningProcesses"), (*v2_of)() = dlsym(nvml, "nvmlDeviceGetComputeRunningProcesses_v3");
    int (*details_of)() = dlsym(nvml, "nvmlDeviceGetRunningProcessDetailList");
    EXPECT(v2_of(device, &count, NULL) == 7 && count == 1);
    EXPECT(v2_of(device, NULL, v2) == 2 && details_of(device, NULL) == 2);
    CHECK(v2_of(device, &count, v2));
    EXPECT(count == 1 && v2[0].pid == pid && v2[0].used == used && v2[0].gpu_instance == 0xffffffff);
    count = 4;
    CHECK(v1_of(device, &count, v1));
    EXPECT(count == 1 && v1[0].pid == pid && v1[0].used == used);
    CHECK(details_of(device, &details));
    EXPECT(details.count == 1 && detail[0].pid == pid && detail[0].used == used);
    count = details.count = 4;
    details.mode = 1;
    CHECK(((int (*)())dlsym(nvml, "nvmlDeviceGetGraphicsRunningProcesses_v3"))(device, &count, v2));
    CHECK(details_of(device, &details));
    EXPECT(count == 0 && details.count == 0);
}
static void look(unsigned pid) {
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW), *device;
    EXPECT(nvml);
    CHECK(((int (*)())dlsym(nvml, "nvmlInit_v2"))());
    CHECK(((int (*)())dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2"))(0, &device));
    int (*get)() = dlsym(nvml, "nvmlDeviceGetMemoryInfo"), (*get_v2)() = dlsym(nvml, "nvmlDeviceGetMemoryInfo_v2");
    CHECK(get(device, &memory));
    struct memory_v2 second = {.version = 0x2000028};
    CHECK(get_v2(device, &second));
    EXPECT(second.total == memory.total && second.used == memory.used);
    EXPECT(get(device, NULL) == 2 && get_v2(device, NULL) == 2);
    second.version = 1;
    EXPECT(get_v2(device, &second) == 25);
    if (pid) look_for_processes(nvml, device, pid, memory.used);
}
int main(int argc, char **argv) {
    if (argc > 1) {
        look(strcmp(argv[1], "alone") ? getppid() : 0);
        int threads = 0;
        char line[256];
        FILE *status = fopen("/proc/self/status", "r");
        while (fgets(line, sizeof line, status)) sscanf(line, "Threads: %d", &threads);
        printf("%lu of %lu in %d\n", memory.used / MIB, memory.total / MIB, threads);
        return 0;
    }
    start();
    EXPECT(free_bytes() == 100 * MIB);
    alloc(60 * MIB);
    char said[64] = {0};
    int out[2];
    EXPECT(pipe(out) == 0);
    if (fork() == 0) { dup2(out[1], 1); execl(argv[0], argv[0], "looks", NULL); }
    read(out[0], said, sizeof said - 1);
    if (strcmp(said, "60 of 100 in 1\n")) { fprintf(stderr, "it says %s", said); return 1; }
    alloc(10 * MIB);
    look(getpid());
    EXPECT(memory.total == 100 * MIB && memory.used == 70 * MIB && memory.free == 30 * MIB);
    return 0;
}
