/* A function of the host on one blocking stream waits for a kernel that a thread launches later on another one. An event on the
   legacy stream in between, which is a barrier for both, would make that wait for ever. */
#include "guest.h"
#include "waits.h"
#define BYTES (600 * MIB)
static uint64_t memory;
static void *a, *b;
static void *make_ready(void *argument) {
    CHECK(FN(cuCtxSetCurrent)(context));
    for (int i = 0; i < 4; i++) {
        CHECK(launch(memory, 4, 1000, b));
        usleep(5000);
    }
    CHECK(FN(cuStreamSynchronize)(b));
    ready = (uint32_t)(uintptr_t)argument;
    return argument;
}
int main(void) {
    start();
    load_kernel();
    memory = alloc(BYTES);
    CHECK(FN(cuMemsetD32_v2)(memory, 0, BYTES / 4));
    CHECK(FN(cuStreamCreate)(&a, 0));
    CHECK(FN(cuStreamCreate)(&b, 0));
    /* The first launch of a function may wait for functions of the host. */
    CHECK(launch(memory, 4, 1, a));
    CHECK(FN(cuStreamSynchronize)(a));
    uint32_t round = 0;
    do {
        pthread_t thread;
        round++;
        CHECK(FN(cuLaunchHostFunc)(a, wait_until_ready, (void *)(uintptr_t)round));
        CHECK(launch(memory, 4, 1000, a));
        while (begun < round) usleep(100);
        /* Time in which a turn ends: the drain is not complete, whatever it waits for. */
        usleep(150000);
        CHECK(pthread_create(&thread, NULL, make_ready, (void *)(uintptr_t)round));
        CHECK(pthread_join(thread, NULL));
        CHECK(FN(cuStreamSynchronize)(a));
        /* Then work that lets a drain complete. */
        for (int i = 0; i < 100; i++) {
            CHECK(launch(memory, 4, 2000, b));
            CHECK(FN(cuStreamSynchronize)(b));
        }
    } while (goes_on());
    return !counts(memory, 105 * round + 1);
}
