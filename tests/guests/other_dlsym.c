/* Another preloaded library that has a dlsym of its own and hands on what it does not want. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
void *dlsym(void *handle, const char *name) {
    static void *(*next)(void *, const char *);
    if (!next) {
        next = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
        if (!next) next = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    }
    return next(handle, name);
}
