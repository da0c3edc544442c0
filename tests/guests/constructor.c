/* A library whose constructor calls its program. */
#define _GNU_SOURCE
#include <dlfcn.h>
static __attribute__((constructor)) void begin(void) { ((void (*)(void))dlsym(RTLD_DEFAULT, "in_constructor"))(); }
