/* What nvidia-smi does: it never initialises CUDA. First what a relative uses, then what it uses itself. */
#include "guest.h"
struct memory { uint64_t total, free, used; };
struct memory_v2 { unsigned version; uint64_t total, reserved, free, used; };
static struct memory memory;
static void look(void) {
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
}
int main(int argc, char **argv) {
    if (argc > 1) {
        look();
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
    look();
    EXPECT(memory.total == 100 * MIB && memory.used == 70 * MIB && memory.free == 30 * MIB);
    return 0;
}
