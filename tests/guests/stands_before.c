/* Another preloaded library, which stands before functions of the driver with a hook and without, and passes calls on: to the next
 * function, or to the driver's own if BY_HANDLE is set. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
static void *following(const char *name) {
    return dlsym(getenv("BY_HANDLE") ? dlopen("libcuda.so.1", RTLD_NOW) : RTLD_NEXT, name);
}
static int own(size_t *left, size_t *total) { return 0; }
int cuMemGetInfo_v2(size_t *left, size_t *total) __attribute__((alias("own")));
int cuEventQuery(void *event) {
    int (*next)(void *) = following("cuEventQuery");
    if (following("cuMemGetInfo_v2") == (void *)own) puts("it finds itself");
    puts("passed on");
    return next(event);
}
