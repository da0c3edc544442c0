/* Takes the rest of the card's memory in pieces of 64 MiB as it becomes free, until it has so many; says so, and keeps them until the
   file exists that STOP names. */
#include "guest.h"
int main(int count, char **arguments) {
    int left = count > 1 ? atoi(arguments[1]) : 1;
    uint64_t base;
    start();
    while (left > 0 && goes_on()) {
        if (FN(cuMemAlloc_v2)(&base, 64 * MIB) == 0) left--;
        else usleep(200);
    }
    EXPECT(left == 0);
    puts("has them");
    fflush(stdout);
    while (goes_on()) usleep(1000);
    return 0;
}
