/* A kernel of one card works on the memory of the other, with peer access: on what was there before, on what is allocated later, on a small
   allocation, and on what has been away, if WAKE names a file that says so. Then the access is given up, and `again` reaches there all the same; `ended` does so after a second context of the card, which had access, has ended. */
#include "guest.h"
int main(int count, char **arguments) {
    void *other, *second;
    start();
    load_kernel();
    CHECK(FN(cuDevicePrimaryCtxRetain)(&other, 1));
    CHECK(FN(cuCtxSetCurrent)(other));
    uint64_t before = alloc(36 * MIB), small = alloc(4096);
    CHECK(FN(cuMemsetD32_v2)(before, 7, 9 * MIB));
    CHECK(FN(cuMemsetD32_v2)(small, 7, 1024));
    CHECK(FN(cuCtxSynchronize)());
    CHECK(FN(cuCtxSetCurrent)(context));
    EXPECT(FN(cuCtxDisablePeerAccess)(other) == 705);
    CHECK(FN(cuCtxEnablePeerAccess)(other, 0));
    EXPECT(FN(cuCtxEnablePeerAccess)(other, 0) == 704);
    CHECK(FN(cuCtxSetCurrent)(other));
    uint64_t after = alloc(36 * MIB);
    CHECK(FN(cuMemsetD32_v2)(after, 7, 9 * MIB));
    CHECK(FN(cuCtxSynchronize)());
    CHECK(FN(cuCtxSetCurrent)(context));
    printf("ready\n"), fflush(stdout);
    for (const char *wake = getenv("WAKE"); wake && access(wake, F_OK) != 0;) usleep(500);
    uint64_t all[] = {before, small, after};
    size_t words[] = {9 * MIB, 1024, 9 * MIB};
    for (int i = 0; i < 3; i++) CHECK(launch(all[i], words[i], 10, NULL));
    CHECK(FN(cuCtxSynchronize)());
    for (int i = 0; i < 3; i++) holds_in_each_word(all[i], 4 * words[i], 8);
    /* A second context of the card gives its access up: the first one keeps its own. */
    CHECK(FN(cuCtxCreate_v2)(&second, 0, 0));
    CHECK(FN(cuCtxEnablePeerAccess)(other, 0));
    CHECK(FN(cuCtxDisablePeerAccess)(other));
    CHECK(FN(cuCtxEnablePeerAccess)(other, 0));
    CHECK(FN(cuCtxDestroy_v2)(second));
    CHECK(FN(cuCtxSetCurrent)(context));
    CHECK(launch(before, 9 * MIB, 10, NULL));
    CHECK(FN(cuCtxSynchronize)());
    holds_in_each_word(before, 36 * MIB, 9);
    CHECK(FN(cuCtxDisablePeerAccess)(other));
    /* Copies need no access. */
    uint64_t here = alloc(36 * MIB);
    CHECK(FN(cuMemcpyPeer)(here, context, before, other, 36 * MIB));
    holds_in_each_word(here, 36 * MIB, 9);
    if (count > 1 && !strcmp(arguments[1], "ended")) {
        CHECK(FN(cuCtxCreate_v2)(&second, 0, 0));
        CHECK(FN(cuCtxEnablePeerAccess)(other, 0));
        CHECK(FN(cuCtxDestroy_v2)(second));
        CHECK(FN(cuCtxSetCurrent)(context));
    }
    if (count > 1) {
        CHECK(launch(before, 9 * MIB, 10, NULL));
        CHECK(FN(cuCtxSynchronize)());
    }
    return 0;
}
