/* Captures: calls that break them (measured on the card: capture_look_probe), how they spread and end, and the graphs that they
   give. */
#include "rules.h"
#define GLOBAL 0
#define THREAD_LOCAL 1
#define RELAXED 2
#define BEGIN(stream, mode) FN(cuStreamBeginCapture_v2)(stream, mode)
#define END(stream, graph) FN(cuStreamEndCapture)(stream, graph)

static uint64_t memory_;
static void *stream_, *other_, *event_, *empty_;
static void begin(void) {
    start();
    load_kernel();
    memory_ = alloc(2 * MIB);
    CHECK(FN(cuMemsetD32_v2)(memory_, 0, MIB / 4));
    CHECK(launch(memory_ + MIB / 2, 0, 1, NULL));
    CHECK(FN(cuCtxSynchronize)());
    other_ = new_stream(NON_BLOCKING);
    event_ = new_event();
    CHECK(FN(cuGraphCreate)(&empty_, 0));
}
static uint32_t word(void) {
    uint32_t word;
    CHECK(FN(cuCtxSynchronize)());
    CHECK(FN(cuMemcpyDtoH_v2)(&word, memory_, 4ul));
    return word;
}
static int exchange(int mode) { CHECK(FN(cuThreadExchangeStreamCaptureMode)(&mode)); return mode; }

struct look { int which, relaxed, answer; };
static void *look(void *argument) {
    struct look *look = argument;
    unsigned flags;
    int status, r = 0;
    void *of;
    CHECK(FN(cuCtxSetCurrent)(context));
    if (look->relaxed) EXPECT(exchange(RELAXED) == GLOBAL);
    switch (look->which) {
    case 0: r = FN(cuCtxRecordEvent)(context, event_); break;
    case 1: r = FN(cuStreamQuery)(LEGACY); break;
    case 2: r = FN(cuStreamQuery)(other_); break;
    case 3: r = FN(cuEventRecord)(event_, other_); if (!r) r = FN(cuEventQuery)(event_); break;
    case 4: r = FN(cuStreamQuery)(stream_); break;
    case 5: r = FN(cuStreamGetFlags)(stream_, &flags); break;
    case 6: r = FN(cuStreamGetCtx)(stream_, &of); break;
    case 7: r = FN(cuStreamIsCapturing)(stream_, &status); if (!r) EXPECT(status == 1); break;
    case 8: r = FN(cuEventRecord)(event_, LEGACY); break;
    case 9: r = FN(cuCtxSynchronize)(); break;
    case 10: r = FN(cuMemAllocManaged)(&(uint64_t){0}, 4096ul, 1); break;
    case 11: r = FN(cuModuleLoadData)(&of, ".visible .entry step()"); break;
    case 12: r = FN(cuEventRecord)(event_, other_); break;
    case 13: r = FN(cuStreamSynchronize)(stream_); break;
    case 14: r = FN(cuStreamIsCapturing)(LEGACY, &status); if (r == 906) r = 0; break;
    case 15: r = FN(cuGraphInstantiateWithFlags)(&of, empty_, 0ul); break;
    }
    look->answer = r;
    return argument;
}
/* What a look answers; zero: it breaks nothing. */
static int expected(int which, int mode, int blocking, int relaxed) {
    int is_default = !relaxed && mode == GLOBAL ? 900 : 0;
    switch (which) {
    case 0: case 4: case 5: case 9: case 13: return 900;
    case 1: return blocking ? 906 : is_default;
    case 8: return blocking ? 906 : 0;
    case 2: case 3: case 10: case 15: return is_default;
    default: return 0;
    }
}
static void calls_that_break_a_capture(void) {
    begin();
    for (int which = 0; which < 16; which++)
        for (int mode = GLOBAL; mode <= RELAXED; mode++)
            for (int blocking = 0; blocking < 2; blocking++)
                for (int relaxed = 0; relaxed < 2; relaxed++) {
                    struct look it = {which, relaxed, 0};
                    void *graph = NULL;
                    stream_ = new_stream(blocking ? BLOCKING : NON_BLOCKING);
                    CHECK(BEGIN(stream_, mode));
                    CHECK(launch(memory_, 4, 1, stream_));
                    in_thread(look, &it);
                    int answer = expected(which, mode, blocking, relaxed);
                    int after = launch(memory_, 4, 1, stream_), end = END(stream_, &graph);
                    if (it.answer != answer || after != (answer ? 901 : 0) || end != (answer ? 901 : 0) || !graph != !!answer) {
                        fprintf(stderr, "look %d at a capture in mode %d of a %sblocking stream, relaxed %d: %d, then %d, %d\n", which, mode, blocking ? "" : "non-", relaxed, it.answer, after, end);
                        _exit(1);
                    }
                    CHECK(FN(cuStreamDestroy_v2)(stream_));
                }
    /* Another context's captures are none of this one's. */
    void *elsewhere = new_context(0), *graph;
    CHECK(FN(cuCtxPushCurrent_v2)(elsewhere));
    stream_ = new_stream(BLOCKING);
    CHECK(BEGIN(stream_, THREAD_LOCAL));
    CHECK(FN(cuCtxPopCurrent_v2)(NULL));
    CHECK(FN(cuCtxRecordEvent)(context, event_));
    CHECK(FN(cuEventRecord)(event_, LEGACY));
    CHECK(END(stream_, &graph));
}

/* The capturing thread's own calls. */
static void the_modes_of_a_capture(void) {
    begin();
    for (int mode = GLOBAL; mode <= RELAXED; mode++)
        for (int own = GLOBAL; own <= RELAXED; own++) {
            void *graph;
            int breaks = mode != RELAXED && own != RELAXED;
            stream_ = new_stream(NON_BLOCKING);
            exchange(own);
            CHECK(BEGIN(stream_, mode));
            EXPECT(FN(cuMemAlloc_v2)(&(uint64_t){0}, 4096ul) == (breaks ? 900 : 0));
            EXPECT(END(stream_, &graph) == (breaks ? 901 : 0));
            exchange(GLOBAL);
        }
    int wrong = 3;
    EXPECT(FN(cuThreadExchangeStreamCaptureMode)(&wrong) == 1);
}

static void *ends(void *stream) {
    void *graph;
    CHECK(FN(cuCtxSetCurrent)(context));
    return (void *)(uintptr_t)END(stream, &graph);
}
static int ends_elsewhere(void *stream) {
    pthread_t thread;
    void *answer;
    CHECK(pthread_create(&thread, NULL, ends, stream));
    CHECK(pthread_join(thread, &answer));
    return (uintptr_t)answer;
}
static void how_captures_begin_and_end(void) {
    void *graph, *joined;
    begin();
    stream_ = new_stream(BLOCKING), joined = new_stream(BLOCKING);
    EXPECT(BEGIN(LEGACY, GLOBAL) == 900);
    EXPECT(BEGIN(stream_, 3) == 1);
    EXPECT(END(stream_, &graph) == 401);
    for (int mode = GLOBAL; mode <= RELAXED; mode++) {
        CHECK(BEGIN(stream_, mode));
        EXPECT(BEGIN(stream_, mode) == 401);
        EXPECT(ends_elsewhere(stream_) == (mode == RELAXED ? 0 : 908));
        if (mode != RELAXED) CHECK(END(stream_, &graph));
    }
    /* Per-thread streams can be captured as well. */
    CHECK(BEGIN(PER_THREAD, GLOBAL));
    CHECK(launch(memory_, 4, 1, PER_THREAD));
    CHECK(END(PER_THREAD, &graph));
    /* A capture ends only where it began. */
    CHECK(BEGIN(stream_, GLOBAL));
    CHECK(FN(cuEventRecord)(event_, stream_));
    CHECK(FN(cuStreamWaitEvent)(joined, event_, 0));
    EXPECT(END(joined, &graph) == 903);
    EXPECT(END(stream_, &graph) == 901 && !graph);
    /* Work on the legacy stream would wait for streams that capture. */
    CHECK(BEGIN(stream_, RELAXED));
    EXPECT(launch(memory_, 4, 1, LEGACY) == 906);
    EXPECT(END(stream_, &graph) == 901);
    CHECK(BEGIN(stream_, RELAXED));
    EXPECT(FN(cuMemcpyHtoD_v2)(memory_, &graph, 8ul) == 906);
    EXPECT(END(stream_, &graph) == 901);
    /* A stream takes its capture with it. */
    CHECK(BEGIN(stream_, GLOBAL));
    CHECK(FN(cuStreamDestroy_v2)(stream_));
    CHECK(FN(cuMemFree_v2)(alloc(4096)));
    EXPECT(word() == 0);
}

static void how_captures_spread(void) {
    void *graph, *exec, *a, *b, *joined, *fork, *join;
    int status;
    begin();
    a = new_stream(NON_BLOCKING), b = new_stream(NON_BLOCKING), fork = new_event(), join = new_event();
    CHECK(BEGIN(a, GLOBAL));
    CHECK(launch(memory_, 4, 1, a));
    CHECK(FN(cuEventRecord)(fork, a));
    CHECK(FN(cuStreamIsCapturing)(b, &status)); EXPECT(status == 0);
    CHECK(FN(cuStreamWaitEvent)(b, fork, 0));
    CHECK(FN(cuStreamIsCapturing)(b, &status)); EXPECT(status == 1);
    CHECK(launch(memory_, 4, 1, b));
    CHECK(launch(memory_, 4, 1, a));
    CHECK(FN(cuEventRecord)(join, b));
    CHECK(FN(cuStreamWaitEvent)(a, join, 0));
    CHECK(END(a, &graph));
    CHECK(FN(cuStreamIsCapturing)(b, &status)); EXPECT(status == 0);
    CHECK(FN(cuGraphInstantiateWithFlags)(&exec, graph, 0ul));
    EXPECT(word() == 0);
    for (int i = 0; i < 4; i++) CHECK(FN(cuGraphLaunch)(exec, i % 2 ? a : b));
    EXPECT(word() == 12);
    size_t nodes;
    CHECK(FN(cuGraphGetNodes)(graph, NULL, &nodes));
    EXPECT(nodes == 3);
    /* An event of a capture stands for no work that runs. */
    EXPECT(FN(cuEventQuery)(join) == 907 && FN(cuEventSynchronize)(fork) == 907);
    EXPECT(FN(cuStreamWaitEvent)(b, join, 0) == 905);
    CHECK(FN(cuEventRecord)(join, b));
    CHECK(FN(cuEventSynchronize)(join));
    /* And a query of it breaks the capture. */
    CHECK(BEGIN(a, RELAXED));
    CHECK(FN(cuEventRecord)(fork, a));
    EXPECT(FN(cuEventQuery)(fork) == 907);
    EXPECT(END(a, &graph) == 901);
    /* A capture that spread has to be joined again. */
    CHECK(BEGIN(a, GLOBAL));
    CHECK(FN(cuEventRecord)(fork, a));
    CHECK(FN(cuStreamWaitEvent)(b, fork, 0));
    CHECK(launch(memory_, 4, 1, b));
    EXPECT(END(a, &graph) == 904 && !graph);
    CHECK(launch(memory_, 4, 1, b));
    EXPECT(word() == 13);
    /* Two captures do not become one. */
    CHECK(BEGIN(a, GLOBAL));
    CHECK(BEGIN(b, GLOBAL));
    CHECK(FN(cuEventRecord)(fork, a));
    EXPECT(FN(cuStreamWaitEvent)(b, fork, 0) == 902);
    EXPECT(END(a, &graph) == 901 && END(b, &graph) == 901);
    /* Work outside of a capture does not come in. */
    CHECK(FN(cuEventRecord)(join, b));
    CHECK(BEGIN(a, GLOBAL));
    EXPECT(FN(cuStreamWaitEvent)(a, join, 0) == 905);
    EXPECT(END(a, &graph) == 901);
    /* A blocking stream that joins makes the legacy stream's work impossible. */
    joined = new_stream(BLOCKING);
    CHECK(BEGIN(a, GLOBAL));
    CHECK(FN(cuEventRecord)(fork, a));
    CHECK(FN(cuStreamWaitEvent)(joined, fork, 0));
    EXPECT(launch(memory_, 4, 1, LEGACY) == 906);
    EXPECT(END(a, &graph) == 901);
}

static volatile int calls;
static void count(void *data) { (void)data; __sync_fetch_and_add(&calls, 1); }
static void *a_graph(int kernels, int host) {
    void *graph;
    CHECK(BEGIN(stream_, THREAD_LOCAL));
    for (int i = 0; i < kernels; i++) CHECK(launch(memory_, 4, 1, stream_));
    if (host) CHECK(FN(cuLaunchHostFunc)(stream_, count, NULL));
    CHECK(END(stream_, &graph));
    return graph;
}
static void executable_graphs(void) {
    void *exec, *again;
    char info[24], params[32] = {0};
    begin();
    stream_ = new_stream(NON_BLOCKING);
    void *two = a_graph(2, 1), *other_two = a_graph(2, 1), *three = a_graph(3, 0);
    CHECK(FN(cuGraphInstantiateWithFlags)(&exec, two, 0ul));
    CHECK(FN(cuGraphInstantiateWithParams)(&again, three, params));
    /* An executable graph no longer needs its graph. */
    CHECK(FN(cuGraphDestroy)(two));
    CHECK(FN(cuGraphLaunch)(exec, stream_));
    CHECK(FN(cuGraphLaunch)(again, other_));
    EXPECT(word() == 5 && calls == 1);
    CHECK(FN(cuGraphExecUpdate_v2)(exec, other_two, info));
    EXPECT(FN(cuGraphExecUpdate_v2)(exec, three, info) == 910 && *(int *)info == 1);
    CHECK(FN(cuGraphLaunch)(exec, stream_));
    EXPECT(word() == 7 && calls == 2);
    /* An executable graph does not run beside itself, on any stream. */
    hold(stream_);
    CHECK(FN(cuGraphLaunch)(exec, stream_));
    CHECK(FN(cuGraphLaunch)(exec, other_));
    CHECK(FN(cuGraphLaunch)(again, new_stream(NON_BLOCKING)));
    a_while();
    EXPECT(FN(cuStreamQuery)(other_) == NOT_READY);
    /* An executable graph that is destroyed in flight goes on. */
    CHECK(FN(cuGraphExecDestroy)(exec));
    release();
    EXPECT(word() == 14 && calls == 4);
    /* A graph in a graph. */
    void *graph;
    CHECK(BEGIN(stream_, RELAXED));
    CHECK(FN(cuGraphLaunch)(again, stream_));
    CHECK(FN(cuGraphLaunch)(again, stream_));
    CHECK(END(stream_, &graph));
    CHECK(FN(cuGraphInstantiateWithFlags)(&exec, graph, 0ul));
    EXPECT(word() == 14);
    CHECK(FN(cuGraphLaunch)(exec, stream_));
    EXPECT(word() == 20);
}

static void graphs_hold_memory(void) {
    void *graph, *exec;
    uint64_t inside, outside;
    uint32_t from[4] = {5, 6, 7, 8}, to[4] = {0};
    begin();
    stream_ = new_stream(NON_BLOCKING);
    CHECK(FN(cuMemAllocAsync)(&outside, MIB, stream_));
    CHECK(BEGIN(stream_, THREAD_LOCAL));
    CHECK(FN(cuMemAllocAsync)(&inside, MIB, stream_));
    CHECK(FN(cuMemcpyHtoDAsync_v2)(inside, from, sizeof from, stream_));
    CHECK(launch(inside, 4, 1, stream_));
    CHECK(FN(cuMemsetD32Async)(inside + 4, 40, 1ul, stream_));
    CHECK(FN(cuMemcpyDtoDAsync_v2)(memory_, inside, sizeof from, stream_));
    CHECK(FN(cuMemcpyDtoHAsync_v2)(to, memory_, sizeof to, stream_));
    CHECK(FN(cuMemFreeAsync)(inside, stream_));
    CHECK(FN(cuLaunchHostFunc)(stream_, count, NULL));
    CHECK(END(stream_, &graph));
    CHECK(FN(cuGraphInstantiateWithFlags)(&exec, graph, 0ul));
    for (int i = 0; i < 3; i++) {
        CHECK(FN(cuGraphLaunch)(exec, stream_));
        CHECK(FN(cuStreamSynchronize)(stream_));
        EXPECT(to[0] == 6 && to[1] == 40 && to[2] == 8 && to[3] == 9 && calls == i + 1);
        from[0] = 5;
    }
    char info[24];
    EXPECT(FN(cuGraphExecUpdate_v2)(exec, graph, info) == 910);
    EXPECT(word() == 6);
}

static volatile int trims;
static void *trim(void *none) {
    while (trims) CHECK(FN(cuDeviceGraphMemTrim)(0));
    return none;
}
static void memory_of_graphs_is_given_up_beside_launches(void) {
    void *graph, *exec;
    uint64_t inside[32];
    pthread_t thread;
    begin();
    stream_ = new_stream(NON_BLOCKING);
    CHECK(BEGIN(stream_, THREAD_LOCAL));
    for (int i = 0; i < 32; i++) CHECK(FN(cuMemAllocAsync)(&inside[i], MIB, stream_));
    for (int i = 0; i < 32; i++) CHECK(launch(inside[i], 4, 1, stream_));
    for (int i = 0; i < 32; i++) CHECK(FN(cuMemFreeAsync)(inside[i], stream_));
    CHECK(END(stream_, &graph));
    CHECK(FN(cuGraphInstantiateWithFlags)(&exec, graph, 0ul));
    trims = 1;
    CHECK(pthread_create(&thread, NULL, trim, NULL));
    for (int i = 0; i < 1000; i++) {
        CHECK(FN(cuGraphLaunch)(exec, stream_));
        CHECK(FN(cuStreamSynchronize)(stream_));
    }
    trims = 0;
    CHECK(pthread_join(thread, NULL));
}

RULES(RULE(calls_that_break_a_capture), RULE(the_modes_of_a_capture), RULE(how_captures_begin_and_end), RULE(how_captures_spread), RULE(executable_graphs),
      RULE(graphs_hold_memory), RULE(memory_of_graphs_is_given_up_beside_launches))
