/* A program frees memory of a pool, or with an argument memory of no pool, in the order of a stream. It asks the driver whether the stream
   is there, and never synchronizes with it. Then it does nothing, until the file GO exists, and makes all of it again. */
#include "guest.h"
#define BYTES (512 * MIB)
static void *stream_;
static int of_pool = 1;
static uint64_t make(void) {
    uint64_t memory;
    if (of_pool) CHECK(FN(cuMemAllocAsync)(&memory, BYTES, stream_));
    else memory = alloc(BYTES);
    CHECK(FN(cuMemsetD32Async)(memory, 1, BYTES / 4, stream_));
    CHECK(launch(memory, 4, 1, stream_));
    return memory;
}
int main(int argc, char **argv) {
    (void)argv;
    of_pool = argc < 2;
    start();
    load_kernel();
    CHECK(FN(cuStreamCreate)(&stream_, 1));
    CHECK(FN(cuMemFreeAsync)(make(), stream_));
    while (FN(cuStreamQuery)(stream_)) usleep(1000);
    printf("freed\n");
    fflush(stdout);
    while (access(getenv("GO"), F_OK) != 0) usleep(1000);
    uint64_t memory = make();
    CHECK(FN(cuStreamSynchronize)(stream_));
    return !counts(memory, 2);
}
