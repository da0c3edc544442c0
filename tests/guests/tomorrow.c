/* Functions of the driver that are newer than the library, by each way to look them up: `given` or `refused`. */
#include "guest.h"
static int is_given;
static void look(const char *name, int is_known) {
    int must = is_known || is_given, status = 77;
    void *found = &status;
    EXPECT(FN(cuGetProcAddress_v2)(name, &found, 13000, 0ul, &status) == (must ? 0 : 500));
    EXPECT((found != NULL) == must && status == !must);
    found = &status;
    EXPECT(FN(cuGetProcAddress_v2)(name, &found, 13000, 0ul, NULL) == (must ? 0 : 500) && (found != NULL) == must);
    found = &status;
    EXPECT(FN(cuGetProcAddress)(name, &found, 12000, 0ul) == (must ? 0 : 500) && (found != NULL) == must);
}
/* A name that is not found has its message: natively "file: undefined symbol: name". */
static void lacks(void *scope, const char *name) {
    char message[200];
    snprintf(message, sizeof message, "undefined symbol: %s", name);
    EXPECT(!dlsym(scope, name));
    const char *said = dlerror();
    EXPECT(said && strstr(said, message));
}
int main(int count, char **arguments) {
    EXPECT(count == 2);
    is_given = !strcmp(arguments[1], "given");
    CHECK(FN(cuInit)(0));
    look("cuLaunchKernel", 1);
    look("cuLaunchTomorrow", 0);
    /* The name is known, and what it stands for is not. */
    look("cuMemFreeAsync", 0);
    EXPECT((dlsym(driver, "cuLaunchTomorrow") != NULL) == is_given);
    EXPECT((dlsym(driver, "cuMemFreeAsync_v9") != NULL) == is_given);
    EXPECT(dlsym(driver, "cuMemFreeAsync") && dlsym(driver, "cuDeviceGetCount") && dlsym(driver, "odd_waits"));
    lacks(driver, "cuNoSuchThing");
    if (!is_given) lacks(driver, "cuLaunchTomorrow");
    /* The library has these names, and this driver does not. */
    void *scopes[] = {driver, dlopen(NULL, RTLD_NOW), RTLD_DEFAULT, RTLD_NEXT};
    for (int i = 0; i < 4; i++) {
        lacks(scopes[i], "cuStreamQuery");
        lacks(scopes[i], "cuMemcpy");
        lacks(scopes[i], "cuParamSeti");
    }
    /* What is found leaves no message. */
    dlerror();
    EXPECT(dlsym(RTLD_DEFAULT, "cuLaunchKernel") && !dlerror());
    return 0;
}
