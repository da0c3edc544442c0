/* A thread asks NVML while no scheduler answers, and is cancelled meanwhile. It has its answer before it ends. */
#include "guest.h"
static int (*get)();
static volatile int has_asked;
static void *ask(void *none) {
    uint64_t memory[3];
    CHECK(get((void *)16, memory));
    EXPECT(memory[0] == 100 * MIB);
    has_asked = 1;
    pthread_testcancel();
    return none;
}
int main(void) {
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW), *result;
    EXPECT(nvml != NULL);
    get = dlsym(nvml, "nvmlDeviceGetMemoryInfo");
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, ask, NULL));
    while (access(getenv("GO"), F_OK) != 0) usleep(1000);
    CHECK(pthread_cancel(thread));
    CHECK(pthread_join(thread, &result));
    EXPECT(has_asked && result == PTHREAD_CANCELED);
    return 0;
}
