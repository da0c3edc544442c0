/* Memory is freed at once after its work is complete, while the library may look at it: no free waits for long. */
#include "guest.h"
#include <time.h>
#define KEPT (448 * MIB)
#define PART (8 * MIB)
#define LONGEST 4.0
static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}
int main(void) {
    start();
    load_kernel();
    uint64_t kept = alloc(KEPT);
    do {
        uint64_t part = alloc(PART);
        CHECK(launch(part, PART / 4, 100, NULL));
        CHECK(launch(kept, 4, 100, NULL));
        CHECK(FN(cuCtxSynchronize)());
        usleep(20000);
        double begin = seconds();
        CHECK(FN(cuMemFree_v2)(part));
        EXPECT(seconds() - begin < LONGEST);
    } while (goes_on());
    return 0;
}
