/* Contexts with memory are created and destroyed all the time, also while their memory leaves: that of another one is intact. */
#include "guest.h"
#define KEPT (256 * MIB)
static volatile int over;
static int ended;
static void *creates(void *argument) {
    unsigned seed = 1;
    while (!over) {
        void *other;
        uint64_t memory;
        CHECK(FN(cuCtxCreate_v2)(&other, 0, 0));
        for (int i = 0; i < 4; i++) {
            memory = alloc(64 * MIB);
            CHECK(FN(cuMemsetD32Async)(memory, 7, 16 * MIB, NULL));
        }
        usleep(rand_r(&seed) % 40000);
        CHECK(FN(cuCtxDestroy_v2)(other));
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
