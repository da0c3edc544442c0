/* A program that is linked to the driver, and imports a function that does not work with managed memory. */
#include "guest.h"

/* Weak, because there is no driver to link to: the loader finds the function where every program finds it. */
extern int cuIpcGetMemHandle(void *handle, uint64_t base) __attribute__((weak));

int main(void) {
    start();
    char handle[64];
    uint64_t base = alloc(4 * MIB);
    CHECK(cuIpcGetMemHandle(handle, base));
    CHECK(FN(cuMemFree_v2)(base));
    return 0;
}
