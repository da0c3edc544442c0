/* Common parts of the programs that compare the simulated driver with the real one's rules: they run without nvshare. */
#include "guest.h"
#include <sys/mman.h>

/* Each rule is a function; the argument names it. */
struct rule { const char *name; void (*holds)(void); };
static int run_rule(const struct rule *rules, int count, int argc, char **argv) {
    for (int i = 0; argc > 1 && i < count; i++)
        if (!strcmp(rules[i].name, argv[1])) { rules[i].holds(); return 0; }
    fprintf(stderr, "no such rule\n");
    return 2;
}
#define RULES(...) \
    int main(int argc, char **argv) { \
        static const struct rule rules[] = {__VA_ARGS__}; \
        return run_rule(rules, sizeof rules / sizeof *rules, argc, argv); \
    }
#define RULE(name) {#name, name}

#define OK 0
#define NOT_READY 600
#define LEGACY ((void *)1)
#define PER_THREAD ((void *)2)
#define BLOCKING 0
#define NON_BLOCKING 1

static void *new_stream(int flags) {
    void *stream;
    CHECK(FN(cuStreamCreate)(&stream, flags));
    return stream;
}
static void *new_event(void) {
    void *event;
    CHECK(FN(cuEventCreate)(&event, 2));
    return event;
}
/* Makes another context of a device; the current context stays current. */
static void *new_context(int device) {
    void *other, *popped;
    CHECK(FN(cuCtxCreate_v2)(&other, 0, device));
    CHECK(FN(cuCtxPopCurrent_v2)(&popped));
    EXPECT(popped == other);
    return other;
}

/* A function of the host that keeps its stream until `release`. */
static volatile int held_, release_;
static void hold_(void *data) { (void)data; __sync_fetch_and_add(&held_, 1); while (!release_) usleep(100); }
static void hold(void *stream) {
    int before = held_;
    release_ = 0;
    CHECK(FN(cuLaunchHostFunc)(stream, hold_, NULL));
    while (held_ == before) usleep(100);
}
static void release(void) { release_ = 1; }

/* Waits for an answer that comes sooner or later. */
static void await(int answer, int (*ask)(void *), void *of) { while (ask(of) != answer) usleep(200); }
/* Time in which a forbidden event would happen. */
static void a_while(void) { usleep(30000); }

static void in_thread(void *(*body)(void *), void *argument) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, body, argument));
    CHECK(pthread_join(thread, NULL));
}

/* Runs `body` in a process of its own, which the driver has not met. Returns how that ended; `said` is its standard error. */
static int in_process(void (*body)(int), int argument, char *said, size_t size) {
    int ends[2], status;
    size_t length = 0;
    CHECK(pipe(ends));
    pid_t pid = fork();
    if (pid == 0) {
        dup2(ends[1], 2);
        body(argument);
        fprintf(stderr, "it went on\n");
        _exit(0);
    }
    close(ends[1]);
    for (long got; (got = read(ends[0], said + length, size - 1 - length)) > 0;) length += got;
    said[length] = 0;
    close(ends[0]);
    EXPECT(waitpid(pid, &status, 0) == pid);
    return status;
}
