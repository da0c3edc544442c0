/* The driver shuts down in an exit handler that cuInit registers. */
#include "rules.h"

static uint64_t memory_;
static char held_path[] = "/tmp/nvsim-held-XXXXXX";

/* Runs after the driver's handler. */
static void later(void) {
    uint32_t word;
    uint64_t late = 0;
    EXPECT(FN(cuMemcpyDtoH_v2)(&word, memory_, sizeof word) == 4);
    EXPECT(FN(cuCtxSynchronize)() == 4);
    EXPECT(FN(cuInit)(0) == 4);
    CHECK(FN(nvsimLateCalls)(&late));
    EXPECT(late == 3);
}
/* Runs before it. */
static void earlier(void) {
    uint32_t word = 0;
    CHECK(FN(cuMemcpyDtoH_v2)(&word, memory_, sizeof word));
    EXPECT(word == 7);
}

static void handlers_before_the_driver_s_own_may_call_it(void) {
    atexit(later);
    start();
    atexit(earlier);
    memory_ = alloc(4 * MIB);
    CHECK(FN(cuMemsetD32_v2)(memory_, 7, MIB));
}

static void *allocate(void *none) {
    struct { int type, handles, place, device; void *windows; char flags[8]; } properties = {1, 0, 1, 0, NULL, {0}};
    uint64_t physical;
    CHECK(FN(cuMemCreate)(&physical, 2 * MIB, &properties, 0ul));
    return none;
}
/* Another thread is about to get memory when the process exits. */
static void a_move_under_way_stops(void) {
    int status, said[2];
    char line[200] = "", waits[sizeof held_path + 6], held[sizeof held_path + 12];
    EXPECT(mkstemp(held_path) >= 0 && pipe(said) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        pthread_t thread;
        dup2(said[1], 2);
        snprintf(held, sizeof held, "allocations:%s", held_path);
        setenv("NVSIM_HELD", held, 1);
        start();
        CHECK(pthread_create(&thread, NULL, allocate, NULL));
        snprintf(waits, sizeof waits, "%s.waits", held_path);
        while (access(waits, F_OK)) usleep(1000);
        exit(0);
    }
    EXPECT(waitpid(pid, &status, 0) == pid);
    snprintf(waits, sizeof waits, "%s.waits", held_path);
    unlink(held_path), unlink(waits);
    EXPECT(read(said[0], line, sizeof line - 1) > 0);
    EXPECT(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    EXPECT(strstr(line, "cuMemCreate is under way"));
}

RULES(RULE(handlers_before_the_driver_s_own_may_call_it), RULE(a_move_under_way_stops))
