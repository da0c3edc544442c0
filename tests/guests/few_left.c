/* Few descriptors are left when the program uses memory first. */
#include "guest.h"
#include <fcntl.h>
#include <sys/resource.h>
int main(int count, char **arguments) {
    EXPECT(count == 2);
    start();
    struct rlimit few = {64, 64};
    CHECK(setrlimit(RLIMIT_NOFILE, &few));
    int opened[64], last = 0;
    while ((opened[last] = open("/dev/null", O_RDONLY)) >= 0) last++;
    for (int left = atoi(arguments[1]); left > 0; left--) close(opened[--last]);
    uint64_t memory = 0;
    FN(cuMemAlloc_v2)(&memory, 4 * MIB);
    usleep(300000);
    return FN(cuMemAlloc_v2)(&memory, 76 * MIB) != 2;
}
