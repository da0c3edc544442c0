/* How streams wait for each other, and the work that a look at them sees (measured on the card: legacy_look_probe). */
#include "rules.h"

static uint64_t memory_;
static void begin(void) {
    start();
    load_kernel();
    memory_ = alloc(4 * MIB);
    CHECK(FN(cuMemsetD32_v2)(memory_, 0, MIB / 4));
    /* A function is loaded when it is launched first, which waits for functions of the host. */
    CHECK(launch(memory_ + 2 * MIB, 4, 1, NULL));
    CHECK(FN(cuCtxSynchronize)());
}
static int query_stream(void *stream) { return FN(cuStreamQuery)(stream); }
static int query_event(void *event) { return FN(cuEventQuery)(event); }
static int record_all(void *event) { CHECK(FN(cuCtxRecordEvent)(context, event)); return FN(cuEventQuery)(event); }

/* Whether a kernel on a stream completes while another stream is held. The kernel is waited for. */
static int runs(void *stream) {
    CHECK(launch(memory_, 4, 1, stream));
    await(OK, query_stream, stream);
    return 1;
}
/* Whether a kernel does not complete, though others do and there is time. */
static int is_kept(void *stream) {
    void *free = new_stream(NON_BLOCKING);
    CHECK(launch(memory_, 4, 1, stream));
    for (int i = 0; i < 5; i++) {
        CHECK(launch(memory_ + 2 * MIB, 4, 1, free));
        CHECK(FN(cuStreamSynchronize)(free));
        usleep(5000);
    }
    CHECK(FN(cuStreamDestroy_v2)(free));
    return query_stream(stream) == NOT_READY;
}
static void looks(void *held, int legacy_sees, int all_sees) {
    void *event = new_event();
    hold(held);
    EXPECT(query_stream(LEGACY) == (legacy_sees ? NOT_READY : OK));
    EXPECT(record_all(event) == (all_sees ? NOT_READY : OK));
    EXPECT(query_stream(held) == NOT_READY);
    release();
    await(OK, query_event, event);
    CHECK(FN(cuCtxSynchronize)());
    EXPECT(query_stream(LEGACY) == OK && record_all(event) == OK);
}
static void *looks_at_own(void *argument) {
    CHECK(FN(cuCtxSetCurrent)(context));
    looks(PER_THREAD, 1, 1);
    return argument;
}
static void *other_;
static void looks_see_unfinished_work(void) {
    begin();
    looks(new_stream(BLOCKING), 1, 1);
    looks(new_stream(NON_BLOCKING), 0, 1);
    looks(LEGACY, 1, 1);
    looks(PER_THREAD, 1, 1);
    in_thread(looks_at_own, NULL);
    /* Work of another context does not count for this one. */
    other_ = new_context(0);
    CHECK(FN(cuCtxPushCurrent_v2)(other_));
    void *stream = new_stream(BLOCKING), *event;
    hold(stream);
    CHECK(FN(cuCtxPopCurrent_v2)(NULL));
    event = new_event();
    EXPECT(query_stream(LEGACY) == OK && record_all(event) == OK);
    release();
    CHECK(FN(cuStreamSynchronize)(stream));
}

/* Work in flight of a stream that is destroyed is still the context's. */
static void looks_see_work_of_destroyed_streams(void) {
    begin();
    for (int flags = BLOCKING; flags <= NON_BLOCKING; flags++) {
        void *stream = new_stream(flags), *event = new_event();
        hold(stream);
        CHECK(FN(cuStreamDestroy_v2)(stream));
        EXPECT(query_stream(LEGACY) == (flags == BLOCKING ? NOT_READY : OK));
        EXPECT(record_all(event) == NOT_READY);
        release();
        await(OK, query_event, event);
    }
}

/* A look is no barrier; an event on the legacy stream is one, in both directions. */
static void an_event_on_the_legacy_stream_is_a_barrier(void) {
    begin();
    void *a = new_stream(BLOCKING), *b = new_stream(BLOCKING), *n = new_stream(NON_BLOCKING), *event = new_event();
    hold(a);
    EXPECT(runs(b) && runs(n));
    EXPECT(query_stream(LEGACY) == NOT_READY);
    EXPECT(record_all(event) == NOT_READY);
    EXPECT(runs(b) && runs(PER_THREAD) && runs(n));
    CHECK(FN(cuEventRecord)(event, LEGACY));
    /* The event waits for the work of blocking streams, */
    EXPECT(query_event(event) == NOT_READY);
    /* and blocking streams wait for the event; other streams do not. */
    EXPECT(is_kept(b) && is_kept(PER_THREAD) && runs(n));
    /* The same holds for an event behind it. */
    void *behind = new_event();
    CHECK(FN(cuEventRecord)(behind, new_stream(BLOCKING)));
    EXPECT(query_event(behind) == NOT_READY);
    release();
    CHECK(FN(cuEventSynchronize)(event));
    CHECK(FN(cuCtxSynchronize)());
    /* A non-blocking stream is not waited for. */
    hold(n);
    CHECK(FN(cuEventRecord)(event, LEGACY));
    EXPECT(query_event(event) == OK && runs(b));
    release();
    CHECK(FN(cuCtxSynchronize)());
    /* The other way: work on the legacy stream goes first. */
    hold(LEGACY);
    CHECK(FN(cuEventRecord)(event, b));
    EXPECT(query_event(event) == NOT_READY && is_kept(b) && runs(n));
    release();
    CHECK(FN(cuCtxSynchronize)());
    /* Another context has a legacy stream of its own. */
    hold(a);
    CHECK(FN(cuEventRecord)(event, LEGACY));
    void *other = new_context(0);
    CHECK(FN(cuCtxPushCurrent_v2)(other));
    load_kernel();
    void *stream = new_stream(BLOCKING);
    CHECK(FN(cuMemsetD32Async)(memory_, 0, 4ul, stream));
    await(OK, query_stream, stream);
    release();
}

/* The two-sided work of legacy_wait: it is legal, and completes as long as nobody records an event on the legacy stream. */
static volatile int ready;
static void wait_ready(void *data) { (void)data; while (!ready) usleep(50); }
static void *readies(void *b) {
    CHECK(FN(cuCtxSetCurrent)(context));
    CHECK(launch(memory_, 4, 1, b));
    CHECK(FN(cuStreamSynchronize)(b));
    ready = 1;
    return b;
}
static void a_host_function_keeps_only_its_stream(void) {
    begin();
    void *a = new_stream(BLOCKING), *b = new_stream(BLOCKING);
    CHECK(FN(cuLaunchHostFunc)(a, wait_ready, NULL));
    CHECK(launch(memory_, 4, 1, a));
    in_thread(readies, b);
    CHECK(FN(cuStreamSynchronize)(a));
}

/* A function of the host keeps what else stands in the driver's queue for them: others, and moves that found their stream busy. */
static void nothing(void *data) { (void)data; }
static void the_queue_of_host_functions(void) {
    begin();
    void *a = new_stream(NON_BLOCKING), *b = new_stream(NON_BLOCKING), *c = new_stream(NON_BLOCKING);
    uint64_t managed;
    volatile uint32_t *word;
    CHECK(FN(cuMemAllocManaged)(&managed, 2 * MIB, 1));
    CHECK(FN(cuMemHostAlloc)(&word, 4096ul, 1));
    hold(a);
    CHECK(FN(cuLaunchHostFunc)(b, nothing, NULL));
    EXPECT(is_kept(b) && runs(c));
    /* On an idle stream a move is done within the call. */
    CHECK(FN(cuMemPrefetchAsync)(managed, 2 * MIB, 0, c));
    EXPECT(query_stream(c) == OK);
    CHECK(FN(cuStreamWaitValue32_v2)(c, (uint64_t)word, 1, 0));
    CHECK(FN(cuMemPrefetchAsync)(managed, 2 * MIB, 0, c));
    *word = 1;
    EXPECT(is_kept(c));
    release();
    CHECK(FN(cuCtxSynchronize)());
}

static void streams_wait_for_events(void) {
    begin();
    void *a = new_stream(NON_BLOCKING), *b = new_stream(NON_BLOCKING), *event = new_event();
    /* A wait for an event that was never recorded holds nobody up. */
    CHECK(FN(cuStreamWaitEvent)(b, event, 0));
    EXPECT(query_event(event) == OK && runs(b));
    hold(a);
    CHECK(FN(cuEventRecord)(event, a));
    CHECK(FN(cuStreamWaitEvent)(b, event, 0));
    EXPECT(is_kept(b));
    /* A wait counts for the work that the event was recorded behind when the wait was made. */
    CHECK(FN(cuEventRecord)(event, new_stream(NON_BLOCKING)));
    EXPECT(query_event(event) == OK && is_kept(b));
    release();
    CHECK(FN(cuStreamSynchronize)(b));
    uint32_t word;
    CHECK(FN(cuMemcpyDtoH_v2)(&word, memory_, 4ul));
    EXPECT(word == 3);
}

static void *fills_own(void *argument) {
    CHECK(FN(cuCtxSetCurrent)(context));
    EXPECT(runs(PER_THREAD));
    return argument;
}
/* A thread has a default stream in each context. */
static void threads_have_streams_of_their_own(void) {
    begin();
    void *other = new_context(0), *first = context, *event = new_event();
    hold(PER_THREAD);
    in_thread(fills_own, NULL);
    CHECK(FN(cuCtxPushCurrent_v2)(other));
    EXPECT(query_stream(PER_THREAD) == OK);
    void *of_other = new_event();
    hold(PER_THREAD);
    CHECK(FN(cuCtxRecordEvent)(other, of_other));
    EXPECT(query_event(of_other) == NOT_READY);
    CHECK(FN(cuCtxPopCurrent_v2)(NULL));
    release();
    CHECK(FN(cuStreamSynchronize)(PER_THREAD));
    EXPECT(record_all(event) == OK);
}

/* An event must belong to the context that is looked at. */
static void events_have_a_context(void) {
    begin();
    void *other = new_context(0), *event = new_event(), *stream;
    EXPECT(FN(cuCtxRecordEvent)(other, event) == 400);
    CHECK(FN(cuCtxPushCurrent_v2)(other));
    stream = new_stream(NON_BLOCKING);
    EXPECT(FN(cuEventRecord)(event, stream) == 400);
    EXPECT(FN(cuEventRecord)(event, LEGACY) == 400);
    EXPECT(launch(memory_, 4, 1, stream) == 400);
    /* A stream may also wait for an event of another context. */
    CHECK(FN(cuStreamWaitEvent)(stream, event, 0));
}

static volatile int answers[8];
static void calls(void *data) {
    uint64_t base;
    int n = 0, count;
    size_t left, total;
    (void)data;
    answers[n++] = FN(cuMemAlloc_v2)(&base, 4096ul);
    answers[n++] = FN(cuMemGetInfo_v2)(&left, &total);
    answers[n++] = launch(memory_, 4, 1, NULL);
    answers[n++] = FN(cuStreamSynchronize)(NULL);
    answers[n++] = FN(cuCtxGetDevice)(&count);
    answers[n++] = FN(cuDriverGetVersion)(&count);
}
static void call_back(void *stream, int status, void *data) { (void)stream, (void)status; calls(data); }
static void host_functions_call_nothing(void) {
    begin();
    for (int i = 0; i < 2; i++) {
        memset((void *)answers, 0, sizeof answers);
        CHECK(i ? FN(cuStreamAddCallback)(NULL, call_back, NULL, 0) : FN(cuLaunchHostFunc)(NULL, calls, NULL));
        CHECK(FN(cuCtxSynchronize)());
        for (int n = 0; n < 5; n++) EXPECT(answers[n] == 800);
        EXPECT(answers[5] == 0);
    }
}

/* The first launch of a function waits for functions of the host that run. */
static volatile int launched;
static void *launches(void *stream) {
    CHECK(FN(cuCtxSetCurrent)(context));
    CHECK(launch(memory_, 4, 1, stream));
    launched = 1;
    return stream;
}
static void a_first_launch_waits_for_host_functions(void) {
    pthread_t thread;
    begin();
    void *stream = new_stream(NON_BLOCKING);
    hold(new_stream(NON_BLOCKING));
    EXPECT(runs(stream));
    load_kernel();
    CHECK(pthread_create(&thread, NULL, launches, stream));
    a_while();
    const char *loading = getenv("CUDA_MODULE_LOADING");
    EXPECT(loading || !launched);
    if (loading) CHECK(pthread_join(thread, NULL));
    release();
    if (!loading) CHECK(pthread_join(thread, NULL));
    EXPECT(launched);
}

/* A stream takes 1021 pieces of work. The next launch waits, and so do calls of other threads in its context meanwhile. */
static volatile int launches_, asked_;
static void *keeps_launching(void *stream) {
    CHECK(FN(cuCtxSetCurrent)(context));
    for (int i = 0; i < 1100; i++) {
        CHECK(launch(memory_, 0, 0, stream));
        launches_++;
    }
    return stream;
}
static void *asks(void *stream) {
    CHECK(FN(cuCtxSetCurrent)(context));
    EXPECT(query_stream(stream) == OK);
    asked_ = 1;
    return stream;
}
static void a_full_queue_holds_its_context(void) {
    pthread_t launcher, asker;
    begin();
    void *stream = new_stream(BLOCKING), *free = new_stream(NON_BLOCKING), *event;
    void *other = new_context(0), *other_stream;
    CHECK(FN(cuCtxPushCurrent_v2)(other));
    load_kernel();
    other_stream = new_stream(BLOCKING);
    event = new_event();
    CHECK(launch(0, 0, 0, other_stream));
    CHECK(FN(cuStreamSynchronize)(other_stream));
    void *step_there = step_function;
    CHECK(FN(cuCtxPopCurrent_v2)(NULL));
    load_kernel();
    CHECK(launch(memory_, 4, 1, free));
    CHECK(FN(cuCtxSynchronize)());
    hold(stream);
    CHECK(pthread_create(&launcher, NULL, keeps_launching, stream));
    while (launches_ < 1020) usleep(100);
    a_while();
    EXPECT(launches_ == 1020);
    CHECK(pthread_create(&asker, NULL, asks, free));
    a_while();
    EXPECT(!asked_);
    /* Another context goes on. */
    CHECK(FN(cuCtxPushCurrent_v2)(other));
    void *step_here = step_function;
    step_function = step_there;
    CHECK(launch(memory_, 4, 1, other_stream));
    step_function = step_here;
    CHECK(FN(cuStreamSynchronize)(other_stream));
    CHECK(FN(cuCtxRecordEvent)(other, event));
    EXPECT(query_event(event) == OK);
    release();
    CHECK(pthread_join(launcher, NULL));
    CHECK(pthread_join(asker, NULL));
    EXPECT(launches_ == 1100 && asked_);
}

/* A driver before 12.5 has no event behind a whole context. */
static void without_events_of_contexts(void) {
    void *found = &found;
    begin();
    EXPECT(FN(cuCtxRecordEvent)(context, new_event()) == 801);
    EXPECT(FN(cuGetProcAddress_v2)("cuCtxRecordEvent", &found, 12000, 0ul, NULL) == 500 && !found);
}

RULES(RULE(looks_see_unfinished_work), RULE(looks_see_work_of_destroyed_streams), RULE(an_event_on_the_legacy_stream_is_a_barrier), RULE(a_host_function_keeps_only_its_stream), RULE(the_queue_of_host_functions),
      RULE(streams_wait_for_events), RULE(threads_have_streams_of_their_own), RULE(events_have_a_context), RULE(host_functions_call_nothing),
      RULE(a_first_launch_waits_for_host_functions), RULE(a_full_queue_holds_its_context), RULE(without_events_of_contexts))
