/* Work that does not end before it is told to is in flight from the start, before there is any memory that the library could look at: the kernel
   that looks is loaded beside it, and its first launch waits for that work. The program's own calls go on. */
#include "guest.h"
#define PART (64 * MIB)
static void say(const char *what) { puts(what); fflush(stdout); }
static volatile int begun;
static void wait_until_woken(void *data) {
    (void)data;
    begun = 1;
    while (access(getenv("WAKE"), F_OK)) usleep(1000);
    say("over");
}
int main(void) {
    void *stream, *beside, *other;
    uint32_t kernels = 0;
    start();
    load_kernel();
    CHECK(FN(cuStreamCreate)(&stream, 1));
    CHECK(FN(cuStreamCreate)(&beside, 1));
    /* The program's own kernel is loaded already. */
    CHECK(launch(0, 0, 1, beside));
    CHECK(FN(cuStreamSynchronize)(beside));
    CHECK(FN(cuLaunchHostFunc)(stream, wait_until_woken, NULL));
    while (!begun) usleep(100);
    uint64_t memory = alloc(PART);
    CHECK(FN(cuMemsetD32Async)(memory, 0, PART / 4, beside));
    for (int i = 0; i < 200; i++) {
        CHECK(launch(memory, 4, 1, beside));
        CHECK(FN(cuStreamSynchronize)(beside));
        kernels++;
        if (i % 20) continue;
        CHECK(FN(cuStreamCreate)(&other, 1));
        CHECK(launch(alloc(2 * MIB), 4, 1, other));
        CHECK(FN(cuStreamSynchronize)(other));
        CHECK(FN(cuStreamDestroy_v2)(other));
        usleep(10000);
    }
    say("went on");
    CHECK(FN(cuStreamSynchronize)(stream));
    do {
        CHECK(launch(memory, 4, 1, beside));
        CHECK(FN(cuStreamSynchronize)(beside));
        kernels++;
    } while (goes_on());
    return !counts(memory, kernels);
}
