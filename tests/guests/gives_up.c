/* Managed memory that is on the card and leaves it: once, and again whenever the file that AGAIN names is there, until the test stops. */
#include "guest.h"
static const size_t BYTES = 768 * MIB;
static uint64_t memory_;
static void come_and_go(void) {
    CHECK(FN(cuMemPrefetchAsync)(memory_, BYTES, 0, NULL));
    CHECK(FN(cuCtxSynchronize)());
    CHECK(FN(cuMemPrefetchAsync)(memory_, BYTES, -1, NULL));
    CHECK(FN(cuCtxSynchronize)());
    printf("gave up\n"), fflush(stdout);
}
int main(void) {
    const char *again = getenv("AGAIN");
    EXPECT(again);
    start();
    CHECK(FN(cuMemAllocManaged)(&memory_, BYTES, 1));
    for (come_and_go(); goes_on(); usleep(1000)) {
        if (unlink(again) == 0) come_and_go();
    }
    return 0;
}
