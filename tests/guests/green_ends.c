/* Green contexts are created and destroyed all the time, also while memory leaves that was allocated in them. That memory belongs to the
   primary context: it is intact, and is freed later. What runs in a green context goes on when it ends. */
#include "guest.h"
#define KEPT (256 * MIB)
static volatile int over;
static int ended;
static void *creates(void *argument) {
    unsigned seed = 1;
    while (!over) {
        char resource[144];
        void *description, *green, *derived;
        uint64_t memory[4];
        CHECK(FN(cuDeviceGetDevResource)(0, resource, 1));
        CHECK(FN(cuDevResourceGenerateDesc)(&description, resource, 1));
        CHECK(FN(cuGreenCtxCreate)(&green, description, 0, 1));
        CHECK(FN(cuCtxFromGreenCtx)(&derived, green));
        CHECK(FN(cuCtxSetCurrent)(derived));
        for (int i = 0; i < 4; i++) {
            memory[i] = alloc(64 * MIB);
            CHECK(FN(cuMemsetD32Async)(memory[i], 7, 16 * MIB, NULL));
        }
        CHECK(FN(cuCtxSynchronize)());
        usleep(rand_r(&seed) % 40000);
        CHECK(FN(cuGreenCtxDestroy)(green));
        CHECK(FN(cuCtxSetCurrent)(context));
        usleep(rand_r(&seed) % 40000);
        for (int i = 0; i < 4; i++) {
            EXPECT(holds(memory[i], 64 * MIB, 2 * MIB, 7));
            CHECK(FN(cuMemFree_v2)(memory[i]));
        }
        ended++;
    }
    return argument;
}
int main(void) {
    start();
    load_kernel();
    uint64_t kept = alloc(KEPT);
    CHECK(FN(cuMemsetD32_v2)(kept, 0, KEPT / 4));
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, creates, NULL));
    uint32_t rounds = 0;
    do {
        CHECK(launch(kept, KEPT / 4, 2000, NULL));
        CHECK(FN(cuCtxSynchronize)());
        rounds++;
    } while (goes_on());
    over = 1;
    CHECK(pthread_join(thread, NULL));
    EXPECT(holds(kept, KEPT, 2 * MIB, rounds));
    EXPECT(ended > 0);
    return 0;
}
