// Any call of the driver wakes a process that is off the card: does that hold for programs with the CUDA runtime? Each exported function of the
// driver gets a thunk in front (wake_probe.py writes them). A call that finds the door closed restores, unlocks, and goes on.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
extern const char *thunk_names[]; extern void *thunk_places[]; extern void *thunk_reals[]; extern const int thunk_count;
volatile int door;
const char *woken_by = ""; double slept_s, woke_s; int answers[4];
static pthread_mutex_t waking = PTHREAD_MUTEX_INITIALIZER;
static __thread int is_sleeper;
static void *(*c_dlsym)(void *, const char *);
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
static void begin(void) {
    if (c_dlsym) return;
    c_dlsym = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (!c_dlsym) c_dlsym = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
}
static int open_driver(void) {
    static void *driver;
    begin();
    if (driver) return 1;
    void *found = dlopen("libcuda.so.1", RTLD_NOW);
    if (!found) return 0;
    for (int i = 0; i < thunk_count; i++) thunk_reals[i] = c_dlsym(found, thunk_names[i]);
    driver = found;
    return 1;
}
static int step(const char *name, uint64_t word) {
    uint64_t arguments[8] = {word};
    for (int i = 0; i < thunk_count; i++) if (!strcmp(thunk_names[i], name)) return ((int (*)(int, void *))thunk_reals[i])(getpid(), arguments);
    return -1;
}
/* A thunk has found the door closed, or the driver not open. */
void *arrive(long index) {
    open_driver();
    if (door && !is_sleeper) {
        pthread_mutex_lock(&waking);
        if (door) {
            double from = now();
            woken_by = thunk_names[index];
            answers[2] = step("cuCheckpointProcessRestore", 0);
            answers[3] = step("cuCheckpointProcessUnlock", 0);
            woke_s = now() - from;
            door = 0;
        }
        pthread_mutex_unlock(&waking);
    }
    return thunk_reals[index];
}
static void *sleep_here(void *none) {
    double from = now();
    is_sleeper = 1;
    pthread_mutex_lock(&waking);
    door = 1;
    answers[0] = step("cuCheckpointProcessLock", 10000);
    answers[1] = answers[0] ? -1 : step("cuCheckpointProcessCheckpoint", 0);
    slept_s = now() - from;
    pthread_mutex_unlock(&waking);
    return none;
}
int go_to_sleep(void) { pthread_t thread; pthread_create(&thread, NULL, sleep_here, NULL); pthread_join(thread, NULL); return answers[0] ? answers[0] : answers[1]; }
int is_away(void) { return door; }
static void *swap(void *found) {
    if (found && open_driver()) for (int i = 0; i < thunk_count; i++) if (thunk_reals[i] == found) return thunk_places[i];
    return found;
}
static int (*real_look)(const char *, void **, int, uint64_t, int *);
static int look(const char *name, void **place, int version, uint64_t flags, int *status) {
    int answer = real_look(name, place, version, flags, status);
    if (!answer && place) *place = strcmp(name, "cuGetProcAddress") ? swap(*place) : (void *)look;
    return answer;
}
void *dlsym(void *handle, const char *name) {
    begin();
    void *found = c_dlsym(handle, name);
    if (!found || strncmp(name, "cu", 2)) return found;
    if (!strcmp(name, "cuGetProcAddress_v2")) { open_driver(); real_look = c_dlsym(dlopen("libcuda.so.1", RTLD_NOW), name); return look; }
    return swap(found);
}
