/* The program may write to no file any more: a write ends it. */
#include "guest.h"
#include <sys/resource.h>
int main(void) {
    start();
    struct rlimit none = {0, 0};
    CHECK(setrlimit(RLIMIT_FSIZE, &none));
    uint64_t memory = 0;
    /* The library would say why. */
    return FN(cuMemAlloc_v2)(&memory, 4096 * MIB) != 2;
}
