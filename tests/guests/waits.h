/* A function of the host that waits for the program: it notes in `begun` which round it is, and ends when `ready` has come that far. */
#include <time.h>
static volatile uint32_t begun, ready;
static void wait_until_ready(void *data) {
    uint32_t round = (uint32_t)(uintptr_t)data;
    struct timespec began, now;
    begun = round;
    for (clock_gettime(CLOCK_MONOTONIC, &began); ready < round; usleep(100)) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec - began.tv_sec > 60) { fprintf(stderr, "round %u: a function of the host waited 60 s\n", round); _exit(3); }
    }
}
/* Lets it wait on a stream, and returns when it does. */
static void let_wait(uint32_t round, void *stream) {
    CHECK(FN(cuLaunchHostFunc)(stream, wait_until_ready, (void *)(uintptr_t)round));
    while (begun < round) usleep(100);
}
