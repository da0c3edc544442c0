/* A program that is linked to the driver, and imports what managed memory cannot do. */
#include "guest.h"

/* Weak, for want of a driver to link to: it is found where every program finds it. */
extern int cuIpcGetMemHandle(void *handle, uint64_t base) __attribute__((weak));

int main(void) {
    start();
    char handle[64];
    uint64_t base = alloc(4 * MIB);
    CHECK(cuIpcGetMemHandle(handle, base));
    CHECK(FN(cuMemFree_v2)(base));
    return 0;
}
