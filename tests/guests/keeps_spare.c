/* Has freed its only allocation, a small one, and goes on doing nothing until it is told to stop. */
#include "guest.h"
int main(void) {
    start();
    uint64_t at = alloc(1024);
    CHECK(FN(cuMemsetD32_v2)(at, 1, 256));
    CHECK(FN(cuMemFree_v2)(at));
    while (goes_on()) usleep(1000);
    return 0;
}
