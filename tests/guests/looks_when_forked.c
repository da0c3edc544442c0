/* A thread asks NVML while no scheduler answers. A child that is forked meanwhile gets an answer, too. */
#include "guest.h"
static uint64_t memory[3];
static int (*get)();
static volatile int asks;
static void *ask(void *none) {
    asks = 1;
    CHECK(get((void *)16, memory));
    return none;
}
int main(void) {
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    EXPECT(nvml != NULL);
    get = dlsym(nvml, "nvmlDeviceGetMemoryInfo");
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, ask, NULL));
    while (!asks) usleep(100);
    usleep(300000);
    pid_t child = fork();
    if (child == 0) {
        alarm(20);
        uint64_t own[3];
        CHECK(get((void *)16, own));
        _exit(own[0] == 100 * MIB ? 0 : 2);
    }
    int status;
    EXPECT(waitpid(child, &status, 0) == child);
    CHECK(status);
    CHECK(pthread_join(thread, NULL));
    return 0;
}
