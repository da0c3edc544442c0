/* The connection ends and comes back while the process lives: the process counts once in its tenant. */
#include "guest.h"
int main(void) {
    start();
    EXPECT(free_bytes() == 100 * MIB);
    alloc(60 * MIB);
    do {
        for (int fd = 3; fd < 1024; fd++) close(fd);
        /* The client sends something, so that it notices the loss; then it has time to come back. */
        uint64_t base = alloc(4 * MIB);
        usleep(1200000);
        CHECK(FN(cuMemFree_v2)(base));
        size_t left = free_bytes();
        if (left != 40 * MIB) { fprintf(stderr, "%zu MiB left \n", left / MIB); return 1; }
    } while (goes_on());
    EXPECT(FN(cuMemAlloc_v2)(&(uint64_t){0}, 41 * MIB) == 2);
    alloc(40 * MIB);
    return 0;
}
