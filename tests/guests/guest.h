/* Common parts of the guests: the driver by dlopen and dlsym, as the CUDA runtime finds it, and checks that name their line. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB (1024 * 1024ul)
#define CHECK(x) do { long got_ = (long)(x); if (got_) { fprintf(stderr, "%s:%d: %s: %ld\n", __FILE__, __LINE__, #x, got_); _exit(1); } } while (0)
#define EXPECT(x) do { if (!(x)) { fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #x); _exit(1); } } while (0)

static void *driver;
static void *look_up(const char *name) {
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) { fprintf(stderr, "%s\n", dlerror()); _exit(1); }
    dlerror();
    void *found = dlsym(driver, name);
    char *error = dlerror();
    if (found && error) { fprintf(stderr, "%s is found, and dlerror says %s\n", name, error); _exit(1); }
    if (!found) { fprintf(stderr, "%s is missing\n", name); _exit(1); }
    return found;
}
#define FN(name) ((int (*)())look_up(#name))

static void *context;
static void start(void) {
    CHECK(FN(cuInit)(0));
    CHECK(FN(cuDevicePrimaryCtxRetain)(&context, 0));
    CHECK(FN(cuCtxSetCurrent)(context));
}

static uint64_t alloc(size_t bytes) {
    uint64_t base = 0;
    CHECK(FN(cuMemAlloc_v2)(&base, bytes));
    return base;
}

/* Whether there is another round: until the file exists that STOP names. Without STOP there is no other round. */
static int goes_on(void) {
    const char *stop = getenv("STOP");
    return stop && access(stop, F_OK) != 0;
}

/* The file that holds up calls of the simulated driver, which NVSIM_HELD names behind the kind of calls. */
static char *held_file(void) {
    char *held = getenv("NVSIM_HELD"), *file = held ? strchr(held, ':') : NULL;
    EXPECT(file);
    return file + 1;
}

/* So many threads that each get their number, until all of them have ended. */
static void in_threads(int count, void *(*body)(void *)) {
    pthread_t threads[count];
    for (long i = 0; i < count; i++) CHECK(pthread_create(&threads[i], NULL, body, (void *)i));
    for (int i = 0; i < count; i++) CHECK(pthread_join(threads[i], NULL));
}

static size_t free_bytes(void) {
    size_t left = 0, total = 0;
    CHECK(FN(cuMemGetInfo_v2)(&left, &total));
    return left;
}

static void *step_function;
static void load_kernel(void) {
    void *module;
    CHECK(FN(cuModuleLoadData)(&module, ".version 7.0\n.target sm_52\n.address_size 64\n.visible .entry step(.param .u64 a, .param .u64 n, .param .u32 v, .param .u32 t) { ret; }\n"));
    CHECK(FN(cuModuleGetFunction)(&step_function, module, "step"));
}
/* A kernel that adds one to each word of a range and lasts so many microseconds. */
static int launch_of(void *function, uint64_t address, uint64_t words, uint32_t micros, void *stream) {
    uint32_t one = 1;
    void *params[] = {&address, &words, &one, &micros};
    int (*call)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **) = look_up("cuLaunchKernel");
    return call(function, 1, 1, 1, 1, 1, 1, 0, stream, params, NULL);
}
static int launch(uint64_t address, uint64_t words, uint32_t micros, void *stream) {
    return launch_of(step_function, address, words, micros, stream);
}

/* Whether so many kernels have each added one to the four words at an address. */
static int counts(uint64_t memory, uint32_t kernels) {
    uint32_t words[4];
    CHECK(FN(cuMemcpyDtoH_v2)(words, memory, sizeof words));
    for (int i = 0; i < 4; i++)
        if (words[i] != kernels) { fprintf(stderr, "%u of %u launches\n", words[i], kernels); return 0; }
    return 1;
}

/* Stops the guest unless every word of a range has this value. */
static void holds_in_each_word(uint64_t base, size_t bytes, uint32_t value) {
    uint32_t *words = malloc(bytes);
    CHECK(FN(cuMemcpyDtoH_v2)(words, base, bytes));
    for (size_t i = 0; i < bytes / 4; i++) EXPECT(words[i] == value);
    free(words);
}

/* Whether a range holds this value wherever it is looked at: in 64 words, every so many bytes. */
static int holds(uint64_t memory, size_t bytes, size_t every, uint32_t value) {
    uint32_t seen[64];
    for (size_t at = 0; at < bytes; at += every) {
        CHECK(FN(cuMemcpyDtoH_v2)(seen, memory + at, sizeof seen));
        for (int i = 0; i < 64; i++)
            if (seen[i] != value) { fprintf(stderr, "%u instead of %u at %zu\n", seen[i], value, at); return 0; }
    }
    return 1;
}
