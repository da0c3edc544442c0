/* The program has no standard error, and its data file gets that number. */
#include "guest.h"
#include <fcntl.h>
int main(int count, char **arguments) {
    EXPECT(count == 2);
    close(2);
    int data = open(arguments[1], O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (data != 2 || write(data, "data\n", 5) != 5) _exit(9);
    start();
    uint64_t memory = 0;
    /* The library says why. */
    if (FN(cuMemAlloc_v2)(&memory, 4096 * MIB) != 2) _exit(8);
    return 0;
}
