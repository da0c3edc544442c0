/* Memory is freed in the order of a stream while it is being copied out, which is held up; and its context ends. */
#include <dirent.h>
#include "guest.h"
#define BYTES (600 * MIB)
static const char *held;

/* Whether the process has a thread of this name. */
static int has_thread(const char *name) {
    char path[300], found[32];
    int any = 0;
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *task; (task = readdir(tasks));) {
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
        FILE *file = fopen(path, "r");
        if (!file) continue;
        if (fgets(found, sizeof found, file) && !strncmp(found, name, strlen(name))) any = 1;
        fclose(file);
    }
    closedir(tasks);
    return any;
}

/* The copy goes on while the context ends. */
static void *lets_go(void *argument) {
    usleep(200000);
    CHECK(unlink(held));
    return argument;
}

int main(void) {
    void *other, *stream;
    char waits[512];
    pthread_t thread;
    EXPECT(held = held_file());
    snprintf(waits, sizeof waits, "%s.waits", held);
    start();
    CHECK(FN(cuCtxCreate_v2)(&other, 0, 0));
    CHECK(FN(cuStreamCreate)(&stream, 1));
    uint64_t memory = alloc(BYTES);
    CHECK(FN(cuMemsetD32_v2)(memory, 7, BYTES / 4));
    CHECK(FN(cuCtxSynchronize)());
    fclose(fopen(held, "w"));
    puts("ready");
    fflush(stdout);
    while (access(waits, F_OK)) usleep(1000);
    CHECK(FN(cuMemFreeAsync)(memory, stream));
    /* The library asks about work in another context by a thread of its own, which frees the memory. */
    CHECK(FN(cuCtxSetCurrent)(context));
    uint64_t kept = alloc(4 * MIB);
    while (!has_thread("nvshare-free")) usleep(1000);
    usleep(50000);
    CHECK(pthread_create(&thread, NULL, lets_go, NULL));
    CHECK(FN(cuCtxDestroy_v2)(other));
    CHECK(pthread_join(thread, NULL));
    CHECK(FN(cuMemsetD32_v2)(kept, 7, MIB));
    EXPECT(holds(kept, 4 * MIB, 2 * MIB, 7));
    return 0;
}
