/* Work that is in flight until it is told to end: a function of the host waits in a stream. Then kernels run one by one. With "second" the
   stream is one of a second context; with "blocking" a kernel runs on another stream once a drain has been given up; with "unseen" a
   library between the program and the driver does not hear of the stream. */
#include "guest.h"
#define BYTES (600 * MIB)
static void say(const char *what) { puts(what); fflush(stdout); }
static void wait_until_woken(void *data) {
    (void)data;
    say("begun");
    while (access(getenv("WAKE"), F_OK)) usleep(1000);
    say("over");
}
int main(int count, char **arguments) {
    const char *how = count > 1 ? arguments[1] : "";
    int blocks = !strcmp(how, "blocking");
    void *stream, *beside, *second;
    start();
    load_kernel();
    if (!strcmp(how, "second")) {
        CHECK(FN(cuCtxCreate_v2)(&second, 0, 0));
        load_kernel();
    }
    uint64_t memory = alloc(BYTES);
    CHECK(FN(cuMemsetD32_v2)(memory, 0, BYTES / 4));
    CHECK(FN(cuCtxSynchronize)());
    CHECK((strcmp(how, "unseen") ? FN(cuStreamCreate) : FN(nvsimStreamCreate))(&stream, !blocks));
    CHECK(FN(cuStreamCreate)(&beside, !blocks));
    CHECK(launch(memory, 4, 1, stream));
    CHECK(FN(cuLaunchHostFunc)(stream, wait_until_woken, NULL));
    if (blocks) {
        while (access(getenv("GIVEN_UP"), F_OK)) usleep(1000);
        CHECK(launch(memory, 0, 1, beside));
        CHECK(FN(cuStreamSynchronize)(beside));
        say("beside");
    }
    uint32_t kernels = 1;
    do {
        CHECK(FN(cuStreamSynchronize)(stream));
        CHECK(launch(memory, 4, 1, stream));
        kernels++;
    } while (goes_on());
    CHECK(FN(cuStreamSynchronize)(stream));
    return !counts(memory, kernels);
}
