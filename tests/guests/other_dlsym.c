/* Another preloaded library with a dlsym of its own, which passes all requests on. */
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
