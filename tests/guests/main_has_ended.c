/* The first thread has ended, as `main` may by pthread_exit, before another one uses the GPU. From then on the kernel says of /proc/self what it
   says of that thread: it has no executable and no mounts. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuCtxSetCurrent(void *context);
int cuMemAlloc_v2(uint64_t *address, size_t bytes);
int cuStreamWriteValue32_v2(void *stream, uint64_t address, uint32_t value, unsigned flags);

static void check(int result, const char *call) {
    if (!result) return;
    printf("%s: %d\n", call, result);
    exit(1);
}
#define CHECK(call) check(call, #call)

static void *work(void *nothing) {
    char path[4096];
    while (readlink("/proc/self/exe", path, sizeof path) >= 0) usleep(1000);
    void *context;
    uint64_t address;
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuMemAlloc_v2(&address, 4 << 20));
    /* Managed memory is refused. */
    CHECK(cuStreamWriteValue32_v2(0, address, 1, 0));
    puts("done");
    exit(0);
}

int main(void) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, work, NULL));
    pthread_exit(NULL);
}
