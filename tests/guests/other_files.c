/* A thread with descriptors of its own closes all that it did not open, and uses the driver. */
#include "guest.h"
#include <sched.h>
static uint64_t memory;
static int kernels;
static void *works(void *none) {
    CHECK(FN(cuCtxSetCurrent)(context));
    CHECK(unshare(CLONE_FILES));
    for (int fd = 3; fd < 1024; fd++) close(fd);
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 20; i++, kernels++) {
            CHECK(launch(memory, 64, 5000, NULL));
            CHECK(FN(cuCtxSynchronize)());
        }
        /* Long enough to lose the lock to another program. */
        usleep(300000);
    }
    return NULL;
}
int main(void) {
    start();
    load_kernel();
    memory = alloc(512 * MIB);
    CHECK(FN(cuMemsetD32_v2)(memory, 0, 128 * MIB));
    CHECK(FN(cuCtxSynchronize)());
    pthread_t worker;
    CHECK(pthread_create(&worker, NULL, works, NULL));
    pthread_join(worker, NULL);
    EXPECT(counts(memory, kernels));
    return 0;
}
