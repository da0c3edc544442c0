/* A green context ends while memory that was allocated in it is being copied out, which is held up: the copy goes on. */
#include "guest.h"
#define BYTES (600 * MIB)
static const char *held;
int main(void) {
    void *description, *green, *derived;
    char resource[144], waits[512];
    EXPECT(held = held_file());
    snprintf(waits, sizeof waits, "%s.waits", held);
    start();
    CHECK(FN(cuDeviceGetDevResource)(0, resource, 1));
    CHECK(FN(cuDevResourceGenerateDesc)(&description, resource, 1));
    CHECK(FN(cuGreenCtxCreate)(&green, description, 0, 1));
    CHECK(FN(cuCtxFromGreenCtx)(&derived, green));
    CHECK(FN(cuCtxSetCurrent)(derived));
    uint64_t memory = alloc(BYTES);
    CHECK(FN(cuMemsetD32_v2)(memory, 7, BYTES / 4));
    CHECK(FN(cuCtxSynchronize)());
    fclose(fopen(held, "w"));
    puts("ready");
    fflush(stdout);
    while (access(waits, F_OK)) usleep(1000);
    CHECK(FN(cuGreenCtxDestroy)(green));
    CHECK(FN(cuCtxSetCurrent)(context));
    CHECK(unlink(held));
    EXPECT(holds(memory, BYTES, 2 * MIB, 7));
    CHECK(FN(cuMemFree_v2)(memory));
    return 0;
}
