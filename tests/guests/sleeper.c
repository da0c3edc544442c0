/* A program with memory that gives the GPU nothing to do until it is told, by the file GO, and then makes the calls that its arguments
 * name: the first itself, and each other one in a thread. What it does before: the argument behind `first`. Afterwards every word has to
 * be right. */
#include "guest.h"
#define BYTES (8 * MIB)
/* Of each thread of a kernel. In the tests, a KiB takes 8 MiB of the card. */
#define STACK 4096ul
static uint64_t memory_, more_;
static void *stream_, *other_, *event_, *captured_;
static uint32_t value_ = 7;
static volatile int over_;
static pthread_t beginner_;

static void say(const char *word) { printf("%s\n", word); fflush(stdout); }
static void wait_for(const char *name) {
    const char *file = getenv(name);
    EXPECT(file);
    while (access(file, F_OK) != 0) usleep(1000);
}

/* Functions that the program has looked up before it sleeps. */
static int (*event_query_)(), (*event_synchronize_)(), (*stream_query_)(), (*stream_synchronize_)(), (*context_synchronize_)();
static void look_all_up(void) {
    event_query_ = FN(cuEventQuery);
    event_synchronize_ = FN(cuEventSynchronize);
    stream_query_ = FN(cuStreamQuery);
    stream_synchronize_ = FN(cuStreamSynchronize);
    context_synchronize_ = FN(cuCtxSynchronize);
}
/* A library that is linked to the driver. */
static int (*query_)();
static void load_linked(int flags) {
    void *linked = dlopen(getenv("LINKED"), flags);
    EXPECT(linked);
    query_ = dlsym(linked, "query");
}
/* NVML, and functions of it: the first without a hook, the second with one. */
static void *nvml_;
static int (*samples_)(), (*memory_info_)();
static int load_nvml(void) {
    nvml_ = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    EXPECT(nvml_);
    samples_ = dlsym(nvml_, "nvmlDeviceGetSamples");
    memory_info_ = dlsym(nvml_, "nvmlDeviceGetMemoryInfo");
    EXPECT(samples_ && memory_info_);
    return ((int (*)())dlsym(nvml_, "nvmlInit_v2"))();
}
static void *wait_for_event(void *none) {
    wait_for("BEGIN");
    CHECK(((int (*)())dlsym(nvml_, "nvmlEventSetWait_v2"))(NULL, NULL, 60000));
    return none;
}

static volatile int released_;
static void hold(void *none) { (void)none; while (!released_) usleep(100); }

static int call(const char *name) {
    size_t left, total;
    uint32_t word = 0;
    void *found = NULL;
    int status = 0;
    if (!strcmp(name, "launch")) { value_++; return launch(memory_, BYTES / 4, 1, stream_); }
    /* A function of the host waits for a kernel on another stream, and no longer than ten seconds. */
    if (!strcmp(name, "window")) {
        CHECK(FN(cuLaunchHostFunc)(other_, hold, NULL));
        CHECK(call("launch"));
        for (int i = 0; i < 10000 && FN(cuStreamQuery)(stream_) == 600; i++) usleep(1000);
        status = FN(cuStreamQuery)(stream_);
        released_ = 1;
        CHECK(FN(cuStreamSynchronize)(other_));
        return status;
    }
    if (!strcmp(name, "event_query")) return event_query_(event_);
    if (!strcmp(name, "event_synchronize")) return event_synchronize_(event_);
    if (!strcmp(name, "stream_query")) return stream_query_(stream_);
    if (!strcmp(name, "stream_synchronize")) return stream_synchronize_(stream_);
    if (!strcmp(name, "context_synchronize")) return context_synchronize_();
    if (!strcmp(name, "memory_info")) return FN(cuMemGetInfo_v2)(&left, &total);
    if (!strcmp(name, "alloc")) return FN(cuMemAlloc_v2)(&more_, BYTES);
    if (!strcmp(name, "free")) return FN(cuMemFree_v2)(more_);
    if (!strcmp(name, "set_current")) return FN(cuCtxSetCurrent)(context);
    if (!strcmp(name, "copy")) { int answer = FN(cuMemcpyDtoH_v2)(&word, memory_ + 4096, sizeof word); return answer ? answer : word != value_; }
    if (!strcmp(name, "linked")) {
        if (!query_) load_linked(RTLD_LAZY);
        return query_(event_);
    }
    /* The address that a look-up finds while the program sleeps. */
    if (!strcmp(name, "look_up")) return FN(cuEventQuery)(event_);
    if (!strcmp(name, "proc_address")) {
        CHECK(FN(cuGetProcAddress_v2)("cuEventQuery", &found, 12000, 0ul, &status));
        return ((int (*)())found)(event_);
    }
    /* A child has no driver, and waits for nothing. */
    if (!strcmp(name, "fork")) {
        pid_t child = fork();
        if (child == 0) {
            const char *text = NULL;
            _exit(event_query_(event_) && FN(cuMemGetInfo_v2)(&left, &total) && !FN(cuGetErrorString)(3, &text) && text ? 0 : 1);
        }
        EXPECT(waitpid(child, &status, 0) == child);
        return status;
    }
    if (!strcmp(name, "load_nvml")) return load_nvml();
    if (!strcmp(name, "nvml_samples")) {
        int kind = 4;
        unsigned count = 5, sample = 0;
        int answer = samples_((void *)16, 3, 1ull << 40, &kind, &count, &sample);
        return answer ? answer : sample != 6;
    }
    if (!strcmp(name, "nvml_memory_info")) {
        uint64_t memory[3];
        return memory_info_((void *)16, memory);
    }
    if (!strcmp(name, "nvml_tables")) return ((int (*)())dlsym(nvml_, "nvmlInternalGetExportTable"))(NULL, NULL) != 13;
    if (!strcmp(name, "exit")) exit(0);
    fprintf(stderr, "no call %s\n", name);
    return -1;
}
static void *call_in_thread(void *name) {
    CHECK(FN(cuCtxSetCurrent)(context));
    CHECK(call(name));
    return NULL;
}
static void *spin(void *none) { while (!over_); return none; }
/* A capture that begins when the program is told to, and may be held up by the driver. */
static void *begin_capture(void *none) {
    wait_for("BEGIN");
    CHECK(FN(cuStreamBeginCapture_v2)(captured_, 2));
    return none;
}
static void *call_over_and_over(void *none) { while (!over_) CHECK(event_query_(event_)); return none; }

/* Its launches are marked while others wait, and the marks are left when it ends. */
static void *launch_and_end(void *none) {
    uint64_t words = BYTES / 4;
    uint32_t one = 1, micros = 1;
    void *params[] = {&memory_, &words, &one, &micros};
    int (*call)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **) = look_up("cuLaunchKernel_ptsz");
    CHECK(pthread_setname_np(pthread_self(), "launches"));
    CHECK(FN(cuCtxSetCurrent)(context));
    for (int i = 0; i < 64; i++, value_++) CHECK(call(step_function, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL));
    over_ = 1;
    wait_for("END");
    return NULL;
}

static void first(const char *what) {
    uint64_t base;
    pthread_t thread;
    if (!strcmp(what, "linked")) load_linked(RTLD_LAZY);
    if (!strcmp(what, "bound")) load_linked(RTLD_NOW);
    if (!strcmp(what, "bound_past")) load_linked(RTLD_NOW | RTLD_DEEPBIND);
    if (!strcmp(what, "linked_to_nvml")) EXPECT(dlopen(getenv("LINKED_TO_NVML"), RTLD_LAZY));
    if (!strcmp(what, "nvml_waits")) CHECK(pthread_create(&thread, NULL, wait_for_event, NULL));
    if (!strcmp(what, "nvml_tables")) CHECK(call(what));
    if (!strcmp(what, "managed")) CHECK(FN(cuMemAllocManaged)(&base, 4 * MIB, 1));
    if (!strcmp(what, "frees_in_order")) {
        CHECK(FN(cuMemAllocAsync)(&base, (size_t)MIB, NULL));
        CHECK(FN(cuMemFreeAsync)(base, NULL));
    }
    void *pool;
    int of_managed[32] = {2, 0, 1, 0}, card[2] = {1, 0};
    if (!strcmp(what, "makes_pool")) CHECK(FN(cuMemPoolCreate)(&pool, of_managed));
    if (!strcmp(what, "finds_pool")) CHECK(FN(cuMemGetDefaultMemPool)(&pool, card, 2));
    if (!strcmp(what, "finds_current_pool")) CHECK(FN(cuMemGetMemPool)(&pool, card, 2));
    /* Another device reaches its memory, or memory of the driver's own. */
    int descriptor = -1;
    if (!strcmp(what, "describes")) CHECK(FN(cuMemGetHandleForAddressRange)(&descriptor, memory_, (size_t)BYTES, 1, 0ul));
    if (!strcmp(what, "attributes")) {
        unsigned on = 1;
        CHECK(FN(cuPointerSetAttribute)(&on, 6, memory_));
    }
    if (!strcmp(what, "imports")) {
        void *external;
        char described[104] = {1};
        CHECK(FN(cuImportExternalMemory)(&external, described));
    }
    if (!strcmp(what, "spins")) CHECK(pthread_create(&thread, NULL, spin, NULL));
    if (!strcmp(what, "calls")) CHECK(pthread_create(&thread, NULL, call_over_and_over, NULL));
    if (!strcmp(what, "ends")) {
        CHECK(pthread_create(&beginner_, NULL, launch_and_end, NULL));
        while (!over_) usleep(1000);
    }
    /* Each time that it is told to, it computes, and says so by the file BEGIN; the last time it goes on. */
    if (!strcmp(what, "cycles")) {
        say("ready");
        for (;;) {
            wait_for("GO");
            if (access(getenv("END"), F_OK) == 0) break;
            CHECK(unlink(getenv("GO")));
            CHECK(call("launch"));
            CHECK(FN(cuStreamSynchronize)(stream_));
            EXPECT(fclose(fopen(getenv("BEGIN"), "w")) == 0);
        }
        return;
    }
    if (!strcmp(what, "begins")) {
        CHECK(FN(cuStreamCreate)(&captured_, 1));
        CHECK(pthread_create(&beginner_, NULL, begin_capture, NULL));
    }
    if (!strcmp(what, "other_card")) {
        void *other;
        CHECK(FN(cuDevicePrimaryCtxRetain)(&other, 1));
        CHECK(FN(cuCtxSetCurrent)(other));
        CHECK(FN(cuCtxSetCurrent)(context));
    }
    if (!strcmp(what, "captures")) {
        CHECK(FN(cuStreamCreate)(&captured_, 1));
        CHECK(FN(cuStreamBeginCapture_v2)(captured_, 2));
    }
}

int main(int argc, char **argv) {
    const char *before = argc > 2 && !strcmp(argv[1], "first") ? argv[2] : "";
    /* As PyTorch does, which asks NVML whether there are GPUs. */
    if (!strncmp(before, "nvml", 4)) CHECK(load_nvml());
    start();
    look_all_up();
    load_kernel();
    CHECK(FN(cuCtxSetLimit)(0, STACK));
    memory_ = alloc(BYTES);
    more_ = alloc(2 * MIB);
    CHECK(FN(cuStreamCreate)(&stream_, 1));
    CHECK(FN(cuStreamCreate)(&other_, 1));
    CHECK(FN(cuEventCreate)(&event_, 2));
    CHECK(FN(cuMemsetD32_v2)(memory_, value_, BYTES / 4));
    CHECK(FN(cuCtxSynchronize)());
    CHECK(call("launch"));
    CHECK(FN(cuEventRecord)(event_, stream_));
    CHECK(FN(cuStreamSynchronize)(stream_));
    first(before);
    if (strcmp(before, "cycles")) say("ready");
    wait_for("GO");
    over_ = 1;
    void *graph;
    if (beginner_) CHECK(pthread_join(beginner_, NULL));
    if (captured_) CHECK(FN(cuStreamEndCapture)(captured_, &graph));
    pthread_t threads[argc];
    int from = *before ? 3 : 1;
    for (int i = from + 1; i < argc; i++) CHECK(pthread_create(&threads[i], NULL, call_in_thread, argv[i]));
    if (from < argc) CHECK(call(argv[from]));
    for (int i = from + 1; i < argc; i++) CHECK(pthread_join(threads[i], NULL));
    say("called");
    size_t limit;
    uint64_t taken;
    CHECK(FN(cuCtxGetLimit)(&limit, 0));
    EXPECT(limit == STACK);
    /* A context, modules and events. */
    CHECK(FN(nvsimTaken)(&taken));
    EXPECT(taken <= (96 + 3 * 4) * MIB);
    CHECK(call("launch"));
    CHECK(FN(cuCtxSynchronize)());
    holds_in_each_word(memory_, BYTES, value_);
    say("done");
    return 0;
}
