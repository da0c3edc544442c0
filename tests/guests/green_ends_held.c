/* A green context ends while its memory is being copied out, which is held up: the end waits for the copy. */
#include "guest.h"
#define BYTES (600 * MIB)
static const char *held;
static void *lets_go(void *none) {
    usleep(200000);
    CHECK(unlink(held));
    return none;
}
int main(void) {
    void *description, *green, *derived;
    char resource[144], waits[512];
    pthread_t thread;
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
    CHECK(pthread_create(&thread, NULL, lets_go, NULL));
    CHECK(FN(cuGreenCtxDestroy)(green));
    EXPECT(access(held, F_OK));
    CHECK(pthread_join(thread, NULL));
    CHECK(FN(cuCtxSetCurrent)(context));
    CHECK(FN(cuCtxSynchronize)());
    return 0;
}
