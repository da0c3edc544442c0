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
    EXPECT(!dlsym(driver, "cuNoSuchThing"));
    return 0;
}
