/* Threads are cancelled while the driver works for them: unwinding passes the library's frames, and the accounts stay right. */
#include "guest.h"
enum { LAUNCH, SYNCHRONIZE, COPY, ALLOC, ALLOC_ORDERED, FREE, CALLS };
static int (*call[CALLS])();
static uint64_t memory;

static void *work(void *which) {
    uint64_t other;
    switch ((intptr_t)which) {
    case LAUNCH: call[LAUNCH](NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL); break;
    case SYNCHRONIZE: call[SYNCHRONIZE](NULL); break;
    case COPY: call[COPY](&other, memory, sizeof other); break;
    case ALLOC: call[ALLOC](&other, MIB); break;
    case ALLOC_ORDERED: call[ALLOC_ORDERED](&other, MIB, NULL); break;
    case FREE: call[FREE](memory); break;
    }
    return NULL;
}

int main(void) {
    CHECK(FN(cuInit)(0));
    const char *names[CALLS] = {"cuLaunchKernel", "cuStreamSynchronize", "cuMemcpyDtoH_v2", "cuMemAlloc_v2", "cuMemAllocAsync", "cuMemFree_v2"};
    for (int i = 0; i < CALLS; i++) call[i] = look_up(names[i]);
    void (*waits)(int) = look_up("odd_waits");
    int (*inside)(void) = look_up("odd_inside");
    memory = alloc(MIB);
    /* The program has the lock, and no thread of the library waits in the driver. */
    CHECK(launch(0, 0, 0, NULL));
    size_t before = free_bytes();
    for (intptr_t i = 0; i < CALLS; i++) {
        pthread_t thread;
        void *result;
        waits(1);
        CHECK(pthread_create(&thread, NULL, work, (void *)i));
        while (inside() <= i) usleep(1000);
        CHECK(pthread_cancel(thread));
        CHECK(pthread_join(thread, &result));
        EXPECT(result == PTHREAD_CANCELED);
        waits(0);
        CHECK(launch(0, 0, 0, NULL));
        if (free_bytes() != before) { fprintf(stderr, "%s: %ld bytes\n", names[i], (long)(before - free_bytes())); return 1; }
    }
    CHECK(call[FREE](memory));
    EXPECT(free_bytes() == before + MIB);
    return 0;
}
