/* Calls one function of the driver with nothing but zeros, and prints the result: the caller compares. */
#include "guest.h"
int main(int argc, char **argv) {
    EXPECT(argc == 2);
    start();
    void *function = dlsym(driver, argv[1]);
    if (!function) { printf("absent\n"); return 0; }
    long (*call)(long, long, long, long, long, long, long, long, long, long, long, long) = function;
    printf("%d\n", (int)call(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
    return 0;
}
