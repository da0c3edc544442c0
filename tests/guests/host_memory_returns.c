/* The program has memory that leaves and comes back, and copies of it are on the host. It frees most of it, and then page-locks
   memory of its own, for which there is enough only if the library has given back what it does not need any more. */
#include "guest.h"
enum { COUNT = 8 };
static const size_t EACH = 64 * MIB;
static void tell(const char *what) { printf("%s\n", what); fflush(stdout); }
static void keep_busy_until(const char *variable) {
    const char *path = getenv(variable);
    EXPECT(path);
    while (access(path, F_OK) != 0) {
        CHECK(launch(0, 0, 1000, NULL));
        CHECK(FN(cuCtxSynchronize)());
    }
}
int main(void) {
    uint64_t base[COUNT];
    start();
    load_kernel();
    for (int i = 0; i < COUNT; i++) {
        base[i] = alloc(EACH);
        CHECK(FN(cuMemsetD32_v2)(base[i], 7000 + i, EACH / 4));
    }
    tell("has memory");
    keep_busy_until("WAKE");
    for (int i = 0; i < COUNT - 1; i++) CHECK(FN(cuMemFree_v2)(base[i]));
    void *own = NULL;
    int result = 2;
    for (int tries = 0; result == 2 && tries < 3000; tries++) {
        result = FN(cuMemHostAlloc)(&own, (COUNT - 1) * EACH, 0);
        if (result == 2) usleep(10000);
    }
    CHECK(result);
    CHECK(FN(cuMemFreeHost)(own));
    tell("page-locked");
    keep_busy_until("STOP");
    uint32_t *words = malloc(EACH);
    CHECK(FN(cuMemcpyDtoH_v2)(words, base[COUNT - 1], EACH));
    for (size_t i = 0; i < EACH / 4; i++) EXPECT(words[i] == 7000 + COUNT - 1);
    tell("right");
    return 0;
}
