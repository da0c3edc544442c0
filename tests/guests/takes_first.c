/* The first thing that it does with the GPU is to take 60 MiB, once the file exists that GO names. It says what the driver answered,
   and keeps what it has until the file exists that STOP names. */
#include "guest.h"
int main(void) {
    uint64_t base;
    start();
    puts("is up");
    fflush(stdout);
    while (access(getenv("GO"), F_OK) != 0) usleep(100);
    printf("%d\n", FN(cuMemAlloc_v2)(&base, 60 * MIB));
    fflush(stdout);
    while (goes_on()) usleep(1000);
    return 0;
}
