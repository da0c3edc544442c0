/* Four threads, each on its own default stream, under turns, each with more work than the GPU has time for. Work in flight is
   bounded while another client waits, and a drain waits for all of it. */
#include "guest.h"
#define WORDS (150 * MIB / 4)
static void *work(void *argument) {
    uint64_t words = WORDS, base;
    uint32_t one = 1, micros = 1000, rounds = 0, seen[64];
    int (*call)() = look_up("cuLaunchKernel_ptsz");
    CHECK(FN(cuCtxSetCurrent)(context));
    base = alloc(150 * MIB);
    CHECK(FN(cuMemsetD32_v2)(base, 0, WORDS));
    void *params[] = {&base, &words, &one, &micros};
    do {
        for (int i = 0; i < 3; i++) CHECK(call(step_function, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL));
        rounds += 3;
        /* A driver's queues have an end. */
        if (rounds % 1200 == 0) CHECK(FN(cuStreamSynchronize)((void *)2));
        usleep(2000);
    } while (goes_on());
    for (size_t at = 0; at < 150 * MIB; at += 30 * MIB) {
        CHECK(FN(cuMemcpyDtoH_v2_ptds)(seen, base + at, sizeof seen));
        for (int i = 0; i < 64; i++)
            if (seen[i] != rounds) { fprintf(stderr, "%u of %u rounds\n", seen[i], rounds); _exit(1); }
    }
    return argument;
}
int main(void) {
    start();
    load_kernel();
    in_threads(4, work);
    return 0;
}
