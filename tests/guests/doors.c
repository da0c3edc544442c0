/* A plugin of its own scope, a linked look-up and the driver's own look-up all give the same hook. Odd requests get the
   driver's answer. */
#include "guest.h"
int main(int argc, char **argv) {
    EXPECT(argc == 3);
    /* Nobody has loaded a driver yet: a program that looks for one finds none. */
    EXPECT(dlsym(RTLD_DEFAULT, "cuInit") == NULL && dlsym(RTLD_DEFAULT, "cuLaunchKernel") == NULL);
    EXPECT(dlsym(RTLD_DEFAULT, "cuEventQuery") == NULL); /* It has no hook. */
    /* The look-up comes before cuInit. */
    void *direct = look_up("cuLaunchKernel");
    void *plugin = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!plugin) { fprintf(stderr, "%s\n", dlerror()); return 1; }
    void *(*ask)(const char *) = dlsym(plugin, "plugin_look_up");
    EXPECT(ask && ask("cuLaunchKernel") == direct);
    /* A plugin that is bound to its own libraries first has libc's own dlsym: it works, and the library does not see its
       launches. */
    plugin = dlopen(argv[2], RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    ask = dlsym(plugin, "plugin_look_up");
    EXPECT(ask && ask("cuLaunchKernel"));
    start();
    void *found = NULL;
    CHECK(FN(cuGetProcAddress_v2)("cuLaunchKernel", &found, 13000, 0ul, NULL));
    EXPECT(found == direct);
    EXPECT(dlsym(driver, "cuLaunchKernel") == direct && dlvsym(driver, "cuNoSuchThing", "LIBCUDA") == NULL);
    /* An unknown version and unknown flags, unknown names, and null places. */
    FN(cuGetProcAddress_v2)("cuLaunchKernel", &found, 99999, 0xffful, NULL);
    EXPECT(FN(cuGetProcAddress_v2)("cuNoSuchThing", &found, 13000, 0ul, NULL) != 0);
    EXPECT(FN(cuGetProcAddress_v2)(NULL, &found, 13000, 0ul, NULL) != 0);
    EXPECT(FN(cuGetProcAddress_v2)("cuLaunchKernel", NULL, 13000, 0ul, NULL) != 0);
    EXPECT(dlsym(driver, "cuNoSuchThing") == NULL && dlsym(driver, "cudnnCreate") == NULL && dlerror() != NULL);
    EXPECT(dlsym(RTLD_DEFAULT, "malloc") != NULL && dlsym(RTLD_NEXT, "malloc") != NULL);
    return 0;
}
