/* A plug-in with a function of its own whose name looks like one of the driver's. It is in the plug-in's scope alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
int cuOwnThing(void) { return 7; }
int finds_own_name(void) {
    int (*found)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "cuOwnThing");
    return found && found() == 7;
}
