/* Handles have lifetimes: a call with one that has ended stops the process, and says which call and which handle. */
#include "rules.h"

/* Shared with the process that is stopped: the handle that this process uses. */
static void *volatile *ended;
static void *stream_, *event_, *graph_, *exec_, *module_;
static uint64_t memory_;

static void *a_stream(void) { *ended = new_stream(BLOCKING); CHECK(FN(cuStreamDestroy_v2)(*ended)); return *ended; }
static void *an_event(void) { *ended = new_event(); CHECK(FN(cuEventDestroy_v2)(*ended)); return *ended; }
static void *a_context(void) { *ended = new_context(0); CHECK(FN(cuCtxDestroy_v2)(*ended)); return *ended; }
static void *a_graph(void) {
    void *graph;
    CHECK(FN(cuStreamBeginCapture_v2)(stream_, 0));
    CHECK(launch(memory_, 4, 1, stream_));
    CHECK(FN(cuStreamEndCapture)(stream_, &graph));
    return graph;
}
static void *an_exec(void) {
    void *exec;
    CHECK(FN(cuGraphInstantiateWithFlags)(&exec, a_graph(), 0ul));
    return exec;
}
static void *ended_graph(void) { *ended = a_graph(); CHECK(FN(cuGraphDestroy)(*ended)); return *ended; }
static void *ended_exec(void) { *ended = an_exec(); CHECK(FN(cuGraphExecDestroy)(*ended)); return *ended; }
static void *ended_module(void) {
    CHECK(FN(cuModuleLoadData)((void **)ended, ".visible .entry step()"));
    CHECK(FN(cuModuleUnload)(*ended));
    return *ended;
}
static void *ended_green(void) {
    void *green;
    char resource[144];
    void *description;
    CHECK(FN(cuDeviceGetDevResource)(0, resource, 1));
    CHECK(FN(cuDevResourceGenerateDesc)(&description, resource, 1));
    CHECK(FN(cuGreenCtxCreate)(&green, description, 0, 1));
    CHECK(FN(cuGreenCtxDestroy)(green));
    return *ended = green;
}
static void *ended_pool(void) {
    int properties[32] = {1, 0, 1, 0};
    CHECK(FN(cuMemPoolCreate)((void **)ended, properties));
    CHECK(FN(cuMemPoolDestroy)(*ended));
    return *ended;
}
static void nothing(void *data) { (void)data; }

static void record_stream(void) { FN(cuEventRecord)(event_, a_stream()); }
static void query_stream(void) { FN(cuStreamQuery)(a_stream()); }
static void synchronize_stream(void) { FN(cuStreamSynchronize)(a_stream()); }
static void launch_on_stream(void) { launch(memory_, 4, 1, a_stream()); }
static void wait_on_stream(void) { FN(cuStreamWaitEvent)(a_stream(), event_, 0); }
static void destroy_stream(void) { FN(cuStreamDestroy_v2)(a_stream()); }
static void capturing_stream(void) { int status; FN(cuStreamIsCapturing)(a_stream(), &status); }
static void flags_of_stream(void) { unsigned flags; FN(cuStreamGetFlags)(a_stream(), &flags); }
static void context_of_stream(void) { void *of; FN(cuStreamGetCtx)(a_stream(), &of); }
static void capture_stream(void) { FN(cuStreamBeginCapture_v2)(a_stream(), 0); }
static void call_on_stream(void) { FN(cuLaunchHostFunc)(a_stream(), nothing, NULL); }
static void fill_on_stream(void) { FN(cuMemsetD32Async)(memory_, 1, 4ul, a_stream()); }
static void allocate_on_stream(void) { uint64_t base; FN(cuMemAllocAsync)(&base, 4096ul, a_stream()); }
static void graph_on_stream(void) { FN(cuGraphLaunch)(exec_, a_stream()); }
static void query_event(void) { FN(cuEventQuery)(an_event()); }
static void synchronize_event(void) { FN(cuEventSynchronize)(an_event()); }
static void record_event(void) { FN(cuEventRecord)(an_event(), stream_); }
static void record_event_of_all(void) { FN(cuCtxRecordEvent)(context, an_event()); }
static void wait_for_event(void) { FN(cuStreamWaitEvent)(stream_, an_event(), 0); }
static void destroy_event(void) { FN(cuEventDestroy_v2)(an_event()); }
static void current_context(void) { FN(cuCtxSetCurrent)(a_context()); }
static void push_context(void) { FN(cuCtxPushCurrent_v2)(a_context()); }
static void destroy_context(void) { FN(cuCtxDestroy_v2)(a_context()); }
static void record_context(void) { FN(cuCtxRecordEvent)(a_context(), event_); }
static void instantiate_graph(void) { void *exec; FN(cuGraphInstantiateWithFlags)(&exec, ended_graph(), 0ul); }
static void destroy_graph(void) { FN(cuGraphDestroy)(ended_graph()); }
static void launch_exec(void) { FN(cuGraphLaunch)(ended_exec(), stream_); }
static void update_exec(void) { char info[24]; FN(cuGraphExecUpdate_v2)(ended_exec(), graph_, info); }
static void destroy_exec(void) { FN(cuGraphExecDestroy)(ended_exec()); }
static void function_of_module(void) { void *f; FN(cuModuleGetFunction)(&f, ended_module(), "step"); }
static void function_without_module(void) { CHECK(FN(cuModuleUnload)(module_)); *ended = step_function; launch(memory_, 4, 1, stream_); }
static void pool(void) { uint64_t base; FN(cuMemAllocFromPoolAsync)(&base, 4096ul, ended_pool(), stream_); }
static void green_context(void) { void *stream; FN(cuGreenCtxStreamCreate)(&stream, ended_green(), 1, 0); }

/* Objects that a context takes with it. */
static void with_context(void (*use)(void)) {
    void *other = new_context(0);
    CHECK(FN(cuCtxPushCurrent_v2)(other));
    stream_ = new_stream(NON_BLOCKING);
    event_ = new_event();
    load_kernel();
    memory_ = alloc(MIB);
    exec_ = an_exec();
    CHECK(FN(cuCtxPopCurrent_v2)(NULL));
    CHECK(FN(cuCtxDestroy_v2)(other));
    use();
}
static void use_stream(void) { *ended = stream_; FN(cuStreamQuery)(stream_); }
static void use_event(void) { *ended = event_; FN(cuEventQuery)(event_); }
static void use_function(void) { *ended = step_function; launch(0, 0, 1, NULL); }
static void use_exec(void) { *ended = exec_; FN(cuGraphLaunch)(exec_, new_stream(0)); }
static void stream_of_context(void) { with_context(use_stream); }
static void event_of_context(void) { with_context(use_event); }
static void function_of_context(void) { with_context(use_function); }
static void exec_of_context(void) { with_context(use_exec); }
static void stream_of_reset(void) { *ended = stream_; CHECK(FN(cuDevicePrimaryCtxReset_v2)(0)); FN(cuStreamQuery)(stream_); }

static const struct { const char *call, *what; void (*body)(void); } cases[] = {
    {"cuEventRecord", "stream", record_stream}, {"cuStreamQuery", "stream", query_stream},
    {"cuStreamSynchronize", "stream", synchronize_stream}, {"cuLaunchKernel", "stream", launch_on_stream},
    {"cuStreamWaitEvent", "stream", wait_on_stream}, {"cuStreamDestroy_v2", "stream", destroy_stream},
    {"cuStreamIsCapturing", "stream", capturing_stream}, {"cuStreamGetFlags", "stream", flags_of_stream},
    {"cuStreamGetCtx", "stream", context_of_stream}, {"cuStreamBeginCapture_v2", "stream", capture_stream},
    {"cuLaunchHostFunc", "stream", call_on_stream}, {"cuMemsetD32Async", "stream", fill_on_stream},
    {"cuMemAllocAsync", "stream", allocate_on_stream}, {"cuGraphLaunch", "stream", graph_on_stream},
    {"cuEventQuery", "event", query_event}, {"cuEventSynchronize", "event", synchronize_event},
    {"cuEventRecord", "event", record_event}, {"cuCtxRecordEvent", "event", record_event_of_all},
    {"cuStreamWaitEvent", "event", wait_for_event}, {"cuEventDestroy_v2", "event", destroy_event},
    {"cuCtxSetCurrent", "context", current_context}, {"cuCtxPushCurrent_v2", "context", push_context},
    {"cuCtxDestroy_v2", "context", destroy_context}, {"cuCtxRecordEvent", "context", record_context},
    {"cuGraphInstantiateWithFlags", "graph", instantiate_graph}, {"cuGraphDestroy", "graph", destroy_graph},
    {"cuGraphLaunch", "executable graph", launch_exec}, {"cuGraphExecUpdate_v2", "executable graph", update_exec},
    {"cuGraphExecDestroy", "executable graph", destroy_exec}, {"cuModuleGetFunction", "module", function_of_module},
    {"cuLaunchKernel", "function", function_without_module}, {"cuGreenCtxStreamCreate", "green context", green_context},
    {"cuMemAllocFromPoolAsync", "memory pool", pool},
    {"cuStreamQuery", "stream", stream_of_context}, {"cuEventQuery", "event", event_of_context},
    {"cuLaunchKernel", "function", function_of_context}, {"cuGraphLaunch", "executable graph", exec_of_context},
    {"cuStreamQuery", "stream", stream_of_reset},
};

static void use_ended(int number) {
    start();
    load_kernel();
    memory_ = alloc(MIB);
    stream_ = new_stream(NON_BLOCKING);
    event_ = new_event();
    graph_ = a_graph();
    exec_ = an_exec();
    CHECK(FN(cuModuleLoadData)(&module_, ".visible .entry step()"));
    CHECK(FN(cuModuleGetFunction)(&step_function, module_, "step"));
    cases[number].body();
}

static void ended_handles_stop(void) {
    ended = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++) {
        char line[256], expected[256];
        int status = in_process(use_ended, i, line, sizeof line);
        snprintf(expected, sizeof expected, "nvsim: %s was called with %s 0x%lx, which has ended\n", cases[i].call, cases[i].what, (unsigned long)*ended);
        if (strcmp(line, expected) || !WIFSIGNALED(status) || WTERMSIG(status) != SIGABRT) {
            fprintf(stderr, "case %d, status %x: said %sexpected %s", i, status, line, expected);
            _exit(1);
        }
    }
}

static void a_value_that_was_no_handle_is_an_error(void) {
    void *never = (void *)0xdead0;
    start();
    EXPECT(FN(cuStreamQuery)(never) == 400);
    EXPECT(FN(cuEventQuery)(never) == 400);
    EXPECT(FN(cuStreamDestroy_v2)(never) == 400);
    EXPECT(FN(cuGraphExecDestroy)(never) == 400);
    EXPECT(FN(cuCtxSetCurrent)(never) == 201);
    EXPECT(FN(cuCtxDestroy_v2)(never) == 201);
    /* A handle of one kind is not a handle of another kind. */
    EXPECT(FN(cuEventQuery)(new_stream(0)) == 400);
}

/* The variable in the environment decides. */
static void handles_come_again(void) {
    start();
    const char *reuse = getenv("NVSIM_REUSE_HANDLES");
    int again = reuse && *reuse == '1';
    void *a = new_stream(0), *b = new_stream(0);
    CHECK(FN(cuStreamDestroy_v2)(a));
    CHECK(FN(cuStreamDestroy_v2)(b));
    void *c = new_stream(0), *d = new_stream(0);
    EXPECT((c == b && d == a) == again);
    EXPECT(again || (c != a && c != b && d != a && d != b));
    void *context_a = new_context(0);
    CHECK(FN(cuCtxDestroy_v2)(context_a));
    EXPECT((new_context(0) == context_a) == again);
    uint64_t base = alloc(4 * MIB);
    CHECK(FN(cuMemFree_v2)(base));
    EXPECT((alloc(4 * MIB) == base) == again);
}

static void *other_context;
static volatile int bound, gone;
static void *stays_bound(void *argument) {
    size_t left, total;
    uint64_t base;
    void *made, *popped;
    CHECK(FN(cuCtxSetCurrent)(other_context));
    bound = 1;
    while (!gone) usleep(100);
    EXPECT(FN(cuMemGetInfo_v2)(&left, &total) == 709);
    EXPECT(FN(cuMemAlloc_v2)(&base, 4096ul) == 709);
    EXPECT(FN(cuStreamCreate)(&made, 0) == 709);
    EXPECT(FN(cuEventCreate)(&made, 0) == 709);
    EXPECT(FN(cuCtxSynchronize)() == 709);
    EXPECT(FN(cuStreamQuery)(NULL) == 709);
    EXPECT(FN(cuStreamQuery)(PER_THREAD) == 709);
    /* The context can be popped from the stack. */
    CHECK(FN(cuCtxPopCurrent_v2)(&popped));
    EXPECT(popped == other_context);
    EXPECT(FN(cuCtxPopCurrent_v2)(&popped) == 201);
    EXPECT(FN(cuCtxSynchronize)() == 201);
    return argument;
}
static void a_context_that_another_thread_destroys(void) {
    pthread_t thread;
    start();
    other_context = new_context(0);
    CHECK(pthread_create(&thread, NULL, stays_bound, NULL));
    while (!bound) usleep(100);
    CHECK(FN(cuCtxDestroy_v2)(other_context));
    /* Another context that has its handle by now does not count. */
    if (getenv("NVSIM_REUSE_HANDLES")) EXPECT(new_context(0) == other_context);
    gone = 1;
    CHECK(pthread_join(thread, NULL));
}

static volatile int calls;
static void slow(void *data) { (void)data; usleep(20000); __sync_fetch_and_add(&calls, 1); }
static void work_in_flight_goes_on(void) {
    start();
    /* The work of a destroyed stream goes on. */
    void *stream = new_stream(NON_BLOCKING);
    hold(stream);
    for (int i = 0; i < 3; i++) CHECK(FN(cuLaunchHostFunc)(stream, slow, NULL));
    CHECK(FN(cuStreamDestroy_v2)(stream));
    EXPECT(calls == 0);
    release();
    CHECK(FN(cuCtxSynchronize)());
    EXPECT(calls == 3);
    /* The end of a context waits for its work. */
    void *other, *current;
    CHECK(FN(cuCtxCreate_v2)(&other, 0, 0));
    CHECK(FN(cuLaunchHostFunc)(new_stream(NON_BLOCKING), slow, NULL));
    CHECK(FN(cuLaunchHostFunc)(NULL, slow, NULL));
    CHECK(FN(cuLaunchHostFunc)(PER_THREAD, slow, NULL));
    stream = new_stream(BLOCKING);
    CHECK(FN(cuLaunchHostFunc)(stream, slow, NULL));
    CHECK(FN(cuStreamDestroy_v2)(stream));
    CHECK(FN(cuCtxDestroy_v2)(other));
    EXPECT(calls == 7);
    /* The context was current here, and the one below it is current again. */
    CHECK(FN(cuCtxGetCurrent)(&current));
    EXPECT(current == context);
}

static void a_context_takes_its_memory_along(void) {
    start();
    size_t before = free_bytes();
    void *other;
    uint64_t ordered, managed;
    CHECK(FN(cuCtxCreate_v2)(&other, 0, 0));
    alloc(8 * MIB);
    CHECK(FN(cuMemAllocManaged)(&managed, 8 * MIB, 1));
    CHECK(FN(cuMemsetD32_v2)(managed, 1, 2 * MIB));
    EXPECT(free_bytes() == before - 16 * MIB);
    /* Memory of pools belongs to the device. */
    CHECK(FN(cuMemAllocAsync)(&ordered, 4 * MIB, NULL));
    CHECK(FN(cuCtxDestroy_v2)(other));
    EXPECT(free_bytes() == before - 4 * MIB);
    CHECK(FN(cuMemFree_v2)(ordered));
    EXPECT(free_bytes() == before);
}

static void a_primary_context_keeps_its_handle(void) {
    void *again, *current;
    int flags, active;
    start();
    CHECK(FN(cuDevicePrimaryCtxReset_v2)(0));
    CHECK(FN(cuDevicePrimaryCtxGetState)(0, &flags, &active));
    EXPECT(!active);
    EXPECT(FN(cuCtxSynchronize)() == 709);
    EXPECT(FN(cuCtxSetCurrent)(context) == 709);
    CHECK(FN(cuDevicePrimaryCtxRetain)(&again, 0));
    EXPECT(again == context);
    CHECK(FN(cuCtxSynchronize)());
    /* The context was retained twice. */
    CHECK(FN(cuDevicePrimaryCtxRelease_v2)(0));
    CHECK(FN(cuCtxSynchronize)());
    CHECK(FN(cuDevicePrimaryCtxRelease_v2)(0));
    EXPECT(FN(cuCtxSynchronize)() == 709);
    EXPECT(FN(cuDevicePrimaryCtxRelease_v2)(0) == 201);
}

static void contexts_are_a_stack(void) {
    void *a, *b, *current;
    start();
    CHECK(FN(cuCtxCreate_v2)(&a, 0, 0));
    b = new_context(0);
    CHECK(FN(cuCtxPushCurrent_v2)(b));
    CHECK(FN(cuCtxGetCurrent)(&current)); EXPECT(current == b);
    /* The topmost context is replaced, or taken away. */
    CHECK(FN(cuCtxSetCurrent)(a));
    CHECK(FN(cuCtxSetCurrent)(NULL));
    CHECK(FN(cuCtxGetCurrent)(&current)); EXPECT(current == a);
    CHECK(FN(cuCtxPopCurrent_v2)(&current)); EXPECT(current == a);
    CHECK(FN(cuCtxPopCurrent_v2)(&current)); EXPECT(current == context);
    CHECK(FN(cuCtxGetCurrent)(&current)); EXPECT(current == NULL);
    /* A context that is attached to ends with its last detach. */
    CHECK(FN(cuCtxSetCurrent)(a));
    CHECK(FN(cuCtxAttach)(&current, 0)); EXPECT(current == a);
    CHECK(FN(cuCtxDetach)(a));
    CHECK(FN(cuCtxSynchronize)());
    CHECK(FN(cuCtxDetach)(a));
    EXPECT(FN(cuCtxSynchronize)() == 201);
}

static void a_child_has_no_driver(void) {
    int count, status;
    start();
    pid_t pid = fork();
    if (pid == 0) _exit(FN(cuDeviceGetCount)(&count) == 3 && FN(cuInit)(0) == 3 ? 0 : 1);
    EXPECT(waitpid(pid, &status, 0) == pid && status == 0);
    CHECK(FN(cuDeviceGetCount)(&count));
}

RULES(RULE(ended_handles_stop), RULE(a_value_that_was_no_handle_is_an_error), RULE(handles_come_again), RULE(a_context_that_another_thread_destroys),
      RULE(work_in_flight_goes_on), RULE(a_context_takes_its_memory_along), RULE(a_primary_context_keeps_its_handle), RULE(contexts_are_a_stack),
      RULE(a_child_has_no_driver))
