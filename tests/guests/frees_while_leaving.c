/* Memory is freed in the order of a stream while it is being copied out, which is held up; and its context ends. */
#include <dirent.h>
#include "guest.h"
#include "asleep.h"
#define BYTES (600 * MIB)
static const char *held;

/* The thread of this name; 0: there is none. */
static pid_t find_thread(const char *name) {
    pid_t found = 0;
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *task; (task = readdir(tasks));) {
        pid_t thread = atoi(task->d_name);
        if (thread && !strncmp(said_of(thread, "comm"), name, strlen(name))) found = thread;
    }
    closedir(tasks);
    return found;
}
/* Returns when the thread of this name has waited for another thread in five looks, one after the other: its pauses are another call.
   Where the kernel does not say which call it is in, this returns after a second. */
static void until_it_waits(const char *name) {
    pid_t thread;
    while (!(thread = find_thread(name))) usleep(1000);
    for (int i = 0, looks = 0; i < 100 && looks < 5; i++, usleep(10000))
        looks = atoi(said_of(thread, "syscall")) == SYS_futex ? looks + 1 : 0;
}

/* The copy goes on while the context ends. */
static void *lets_go(void *argument) {
    sleep(1);
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
    until_it_waits("nvshare-free");
    CHECK(pthread_create(&thread, NULL, lets_go, NULL));
    CHECK(FN(cuCtxDestroy_v2)(other));
    CHECK(pthread_join(thread, NULL));
    CHECK(FN(cuMemsetD32_v2)(kept, 7, MIB));
    EXPECT(holds(kept, 4 * MIB, 2 * MIB, 7));
    return 0;
}
