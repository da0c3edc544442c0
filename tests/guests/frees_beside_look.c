/* Memory is freed, its work complete, while the library looks at it, which is held up until that is over: no free waits for a look. With an
   argument, 400 MiB are freed in the order of an idle stream, in parts of that many MiB. The next allocation frees them on its way. */
#include "guest.h"
#include <time.h>
#define KEPT (448 * MIB)
static int count = 1;
static uint64_t parts[400];
static volatile int freed;
static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}
static void free_on_the_way(void) {
    void *stream;
    CHECK(FN(cuStreamCreate)(&stream, 1));
    for (int i = 0; i < count; i++) CHECK(FN(cuMemFreeAsync)(parts[i], stream));
    double begin = seconds();
    alloc(4096);
    /* One wait of 50 ms for each of 200 blocks would be ten. */
    EXPECT(seconds() - begin < 5);
}
static void *frees(void *held) {
    char waits[512];
    snprintf(waits, sizeof waits, "%s.waits", (char *)held);
    CHECK(FN(cuCtxSetCurrent)(context));
    while (access(waits, F_OK)) usleep(1000);
    if (count > 1) free_on_the_way();
    else CHECK(FN(cuMemFree_v2)(parts[0]));
    CHECK(unlink(held));
    freed = 1;
    return NULL;
}
int main(int argc, char **argv) {
    pthread_t thread;
    char *held = held_file();
    EXPECT(held);
    size_t part = argc > 1 ? atoi(argv[1]) * MIB : 8 * MIB;
    if (argc > 1) count = 400 * MIB / part;
    start();
    load_kernel();
    uint64_t kept = alloc(KEPT);
    for (int i = 0; i < count; i++) CHECK(launch(parts[i] = alloc(part), part / 4, 100, NULL));
    CHECK(FN(cuCtxSynchronize)());
    fclose(fopen(held, "w"));
    puts("ready");
    fflush(stdout);
    CHECK(pthread_create(&thread, NULL, frees, held));
    do {
        CHECK(launch(kept, 4, 100, NULL));
        CHECK(FN(cuCtxSynchronize)());
    } while (!freed || goes_on());
    CHECK(pthread_join(thread, NULL));
    return 0;
}
