/* Frees all its memory when it is told to, with no work under way. */
#include "guest.h"
#define BYTES (600 * MIB)
int main(void) {
    uint64_t memory;
    start();
    load_kernel();
    memory = alloc(BYTES);
    CHECK(launch(memory, BYTES / 4, 100, NULL));
    CHECK(FN(cuCtxSynchronize)());
    puts("ran");
    fflush(stdout);
    while (access(getenv("WAKE"), F_OK)) usleep(1000);
    puts("frees");
    fflush(stdout);
    CHECK(FN(cuMemFree_v2)(memory));
    /* What ends with the process is no free. */
    while (goes_on()) usleep(1000);
    return 0;
}
