/* It is linked to a function of the driver that is newer than the library. */
#include "guest.h"
int cuLaunchTomorrow(void *stream);
int main(void) {
    CHECK(FN(cuInit)(0));
    CHECK(cuLaunchTomorrow(NULL));
    return 0;
}
