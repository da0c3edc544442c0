/* The host has memory for 256 MiB. A program has that much there, of memory that does not change, and then gets a larger
   allocation, which leaves first: its way out needs the memory of those copies. */
#include "guest.h"
enum { COUNT = 8 };
static const size_t EACH = 64 * MIB, LARGE = 256 * MIB;
static uint64_t still[COUNT], large;
static int exists(const char *variable) {
    const char *path = getenv(variable);
    EXPECT(path);
    return access(path, F_OK) == 0;
}
static void tell(const char *what) { printf("%s\n", what); fflush(stdout); }
static void keep_busy_until(const char *variable) {
    while (!exists(variable)) {
        CHECK(launch(0, 0, 1000, NULL));
        CHECK(FN(cuCtxSynchronize)());
    }
}
int main(void) {
    start();
    load_kernel();
    for (int i = 0; i < COUNT; i++) {
        still[i] = alloc(EACH);
        CHECK(FN(cuMemsetD32_v2)(still[i], 7000 + i, EACH / 4));
    }
    tell("still");
    keep_busy_until("WAKE");
    large = alloc(LARGE);
    CHECK(FN(cuMemsetD32_v2)(large, 9, LARGE / 4));
    CHECK(FN(cuCtxSynchronize)());
    tell("large");
    keep_busy_until("STOP");
    for (int i = 0; i < COUNT; i++) holds_in_each_word(still[i], EACH, 7000 + i);
    holds_in_each_word(large, LARGE, 9);
    tell("right");
    return 0;
}
