/* Work that is in flight until it is told to end: a function of the host waits in a stream. Then kernels run one by one. */
#include "guest.h"
#define BYTES (600 * MIB)
static void say(const char *what) { puts(what); fflush(stdout); }
static void wait_until_woken(void *data) {
    (void)data;
    say("begun");
    while (access(getenv("WAKE"), F_OK)) usleep(1000);
    say("over");
}
int main(void) {
    void *stream;
    start();
    load_kernel();
    uint64_t memory = alloc(BYTES);
    CHECK(FN(cuMemsetD32_v2)(memory, 0, BYTES / 4));
    CHECK(FN(cuCtxSynchronize)());
    CHECK(FN(cuStreamCreate)(&stream, 1));
    CHECK(launch(memory, 4, 1, stream));
    CHECK(FN(cuLaunchHostFunc)(stream, wait_until_woken, NULL));
    uint32_t kernels = 1;
    do {
        CHECK(FN(cuStreamSynchronize)(stream));
        CHECK(launch(memory, 4, 1, stream));
        kernels++;
    } while (goes_on());
    CHECK(FN(cuStreamSynchronize)(stream));
    return !counts(memory, kernels);
}
