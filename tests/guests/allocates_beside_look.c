/* Memory whose work is complete was freed in the order of an idle stream, and the library looks at all memory, which is held up. An allocation,
   which frees that memory on its way, waits for no look. */
#include "guest.h"
#include <time.h>
#define KEPT (448 * MIB)
/* With an argument, parts that share blocks of 2 MiB. */
#define BYTES (400 * MIB)
static size_t part = 2 * MIB;
static uint64_t parts[400];
static volatile int freed;
static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}
static void *frees(void *held) {
    char waits[512];
    void *stream;
    snprintf(waits, sizeof waits, "%s.waits", (char *)held);
    CHECK(FN(cuCtxSetCurrent)(context));
    CHECK(FN(cuStreamCreate)(&stream, 1));
    while (access(waits, F_OK)) usleep(1000);
    for (size_t i = 0; i < BYTES / part; i++) CHECK(FN(cuMemFreeAsync)(parts[i], stream));
    double begin = seconds();
    alloc(4096);
    printf("took %.3f s\n", seconds() - begin);
    /* One wait of 50 ms for each of 200 blocks would be ten. */
    EXPECT(seconds() - begin < 5);
    CHECK(unlink(held));
    freed = 1;
    return NULL;
}
int main(int argc, char **argv) {
    (void)argv;
    if (argc > 1) part = MIB;
    pthread_t thread;
    char *held = held_file();
    EXPECT(held);
    start();
    load_kernel();
    uint64_t kept = alloc(KEPT);
    for (size_t i = 0; i < BYTES / part; i++) CHECK(launch(parts[i] = alloc(part), part / 4, 1, NULL));
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
