/* A capture stays open until it is told to end, on a stream with the flags of the first argument. Nothing may break it. */
#include "guest.h"
#define BYTES (600 * MIB)
static void say(const char *what) { puts(what); fflush(stdout); }
int main(int count, char **arguments) {
    void *stream, *other, *graph, *exec;
    EXPECT(count == 2);
    start();
    load_kernel();
    uint64_t memory = alloc(BYTES);
    CHECK(FN(cuMemsetD32_v2)(memory, 0, BYTES / 4));
    CHECK(FN(cuCtxSynchronize)());
    CHECK(FN(cuStreamCreate)(&stream, atoi(arguments[1])));
    CHECK(FN(cuStreamCreate)(&other, 1));
    CHECK(launch(memory, 4, 1, stream));
    CHECK(launch(memory, 0, 1, other));
    CHECK(FN(cuStreamBeginCapture_v2)(stream, 2));
    CHECK(launch(memory, 4, 10, stream));
    say("open");
    while (access(getenv("WAKE"), F_OK)) usleep(1000);
    CHECK(launch(memory, 4, 10, stream));
    CHECK(FN(cuStreamEndCapture)(stream, &graph));
    CHECK(FN(cuGraphInstantiateWithFlags)(&exec, graph, 0ul));
    CHECK(FN(cuGraphLaunch)(exec, stream));
    CHECK(FN(cuStreamSynchronize)(stream));
    return !counts(memory, 3);
}
