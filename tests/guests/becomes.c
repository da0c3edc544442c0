/* A process that has memory on the card and becomes another program, which has none: `becomes MIB`. */
#include "guest.h"

int main(int count, char **arguments) {
    EXPECT(count == 2);
    start();
    size_t bytes = strtoul(arguments[1], NULL, 10) * MIB;
    CHECK(FN(cuMemsetD32_v2)(alloc(bytes), 7, bytes / 4));
    CHECK(FN(cuCtxSynchronize)());
    printf("has worked\n"), fflush(stdout);
    unsetenv("LD_PRELOAD");
    execl("/bin/sleep", "sleep", "1000", NULL);
    CHECK(1);
}
