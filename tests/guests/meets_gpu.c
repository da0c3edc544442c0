/* Comes to a second GPU in a way (argument) that names no memory and no stream of it: by its default `stream`, by a new `context` there, or by a `pool` of it. */
#include "guest.h"

int main(int argc, char **argv) {
    void *contexts[2], *functions[2];
    CHECK(FN(cuInit)(0));
    for (int i = 0; i < 2; i++) {
        CHECK(FN(cuDevicePrimaryCtxRetain)(&contexts[i], i));
        CHECK(FN(cuCtxSetCurrent)(contexts[i]));
        load_kernel();
        functions[i] = step_function;
    }
    CHECK(FN(cuCtxSetCurrent)(contexts[0]));
    uint64_t memory = alloc(4 * MIB), other = 0;
    step_function = functions[0];
    CHECK(launch(memory, MIB, 100, NULL));
    if (!strcmp(argv[1], "stream")) {
        CHECK(FN(cuCtxSetCurrent)(contexts[1]));
        step_function = functions[1];
        CHECK(launch(0, 0, 100, NULL));
        CHECK(FN(cuCtxSynchronize)());
    } else if (!strcmp(argv[1], "context")) {
        void *own;
        CHECK(FN(cuCtxCreate_v2)(&own, 0, 1));
        load_kernel();
        CHECK(launch(0, 0, 100, NULL));
        CHECK(FN(cuCtxSynchronize)());
    } else {
        void *pool, *stream;
        CHECK(FN(cuDeviceGetMemPool)(&pool, 1));
        CHECK(FN(cuStreamCreate)(&stream, 1));
        CHECK(FN(cuMemAllocFromPoolAsync)(&other, 4 * MIB, pool, stream));
    }
    while (goes_on()) usleep(1000);
    return 0;
}
