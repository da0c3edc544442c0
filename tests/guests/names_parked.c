/* Each call that names memory, while that memory is away: alone, and beside a capture of each mode. It answers as the driver does of
 * memory that is there, and what a graph took finds the memory when it runs.
 *
 * For each case it says `ask N`, waits for the file PARKED.N (unless PARKED is not set), makes the call, and says what came of it. */
#include "guest.h"
#define BYTES (8 * MIB)
#define WORDS (BYTES / 4)
static uint64_t memory_, other_;
static void *work_, *capturing_, *graph_, *exec_;
static size_t node_;

struct space { size_t x, y, z, level; uint64_t kind; void *host; uint64_t device; void *array, *reserved; size_t pitch, height; };
struct copy { struct space from, to; size_t width, height, depth; };
struct fill { uint64_t address; size_t pitch; unsigned value, element; size_t width, height; };
static struct copy copy_of(uint64_t to, uint64_t from) {
    struct copy copy = {.from = {.kind = 2, .device = from}, .to = {.kind = 2, .device = to}, .width = BYTES, .height = 1, .depth = 1};
    return copy;
}
static struct fill fill_of(uint64_t at, unsigned value) {
    struct fill fill = {.address = at, .value = value, .element = 4, .width = WORDS, .height = 1};
    return fill;
}

/* Questions: what they answer, as text. */
static char said[512];
static int add(const char *name, int answer, uint64_t value) {
    size_t used = strlen(said);
    snprintf(said + used, sizeof said - used, " %s=%d:%lu", name, answer, (unsigned long)value);
    return 0;
}
static int attributes(void) {
    static const int NAMES[] = {2, 3, 4, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19};
    for (unsigned i = 0; i < sizeof NAMES / sizeof *NAMES; i++) {
        uint64_t value = 0;
        char name[8];
        int answer = FN(cuPointerGetAttribute)(&value, NAMES[i], memory_ + 5 * MIB);
        snprintf(name, sizeof name, "%d", NAMES[i]);
        /* Addresses differ from process to process. */
        add(name, answer, value >= memory_ && value < memory_ + BYTES ? value - memory_ : value);
    }
    uint64_t context_now = 0;
    int answer = FN(cuPointerGetAttribute)(&context_now, 1, memory_);
    return add("context", answer, context_now == (uint64_t)context);
}
static int range(void) {
    uint64_t base = 0;
    size_t bytes = 0;
    int answer = FN(cuMemGetAddressRange_v2)(&base, &bytes, memory_ + BYTES - 1);
    return add("range", answer, base == memory_ ? bytes : 0);
}
static int access_of(void) {
    uint64_t flags = 0;
    int answer = FN(cuMemGetAccess)(&flags, (int[2]){1, 0}, memory_);
    return add("access", answer, flags);
}

/* Calls that name addresses to the driver, or take them into a graph. What they do is seen when the memory is back. */
static int new_graph(void) { return FN(cuGraphCreate)(&graph_, 0); }
static int copy_node(void) {
    struct copy copy = copy_of(other_, memory_);
    return FN(cuGraphAddMemcpyNode)(&node_, graph_, NULL, 0ul, &copy, context);
}
static int fill_node(void) {
    struct fill fill = fill_of(memory_, 77);
    return FN(cuGraphAddMemsetNode)(&node_, graph_, NULL, 0ul, &fill, context);
}
/* The form of CUDA 12: parameters of any kind. */
struct params { int kind, reserved[3]; union { struct { int flags[2]; void *context; struct copy copy; } copying; struct { struct fill fill; void *context; } filling; char size[240]; }; };
static struct params copying(uint64_t to, uint64_t from) {
    return (struct params){.kind = 1, .copying = {.context = context, .copy = copy_of(to, from)}};
}
/* It names no context: the driver finds it by the memory. */
static struct params filling(uint64_t at, unsigned value) { return (struct params){.kind = 2, .filling = {.fill = fill_of(at, value)}}; }
static int any_copy_node(void) {
    struct params params = copying(other_, memory_);
    return FN(cuGraphAddNode)(&node_, graph_, NULL, 0ul, &params);
}
static int any_fill_node(void) {
    struct params params = filling(memory_, 80);
    return FN(cuGraphAddNode)(&node_, graph_, NULL, 0ul, &params);
}
static int any_node_with_data(void) {
    struct params params = copying(other_, memory_);
    return FN(cuGraphAddNode_v2)(&node_, graph_, NULL, NULL, 0ul, &params);
}
static int nameless_fill_node(void) {
    struct fill fill = fill_of(memory_, 81);
    return FN(cuGraphAddMemsetNode)(&node_, graph_, NULL, 0ul, &fill, NULL);
}
static int set_fill(void) {
    struct fill fill = fill_of(memory_, 82);
    return FN(cuGraphMemsetNodeSetParams)(node_, &fill);
}
static int set_copy(void) {
    struct copy copy = copy_of(memory_, other_);
    return FN(cuGraphMemcpyNodeSetParams)(node_, &copy);
}
static int set_any(void) {
    struct params params = filling(memory_, 83);
    return FN(cuGraphNodeSetParams)(node_, &params);
}
static int set_any_in_exec(void) {
    struct params params = filling(memory_, 84);
    return FN(cuGraphExecNodeSetParams)(exec_, node_, &params);
}
/* Another context of the device is named: the memory's own counts. */
static int set_elsewhere_in_exec(void) {
    static void *elsewhere;
    if (!elsewhere) {
        CHECK(FN(cuCtxCreate_v2)(&elsewhere, 0, 0));
        CHECK(FN(cuCtxSetCurrent)(context));
    }
    struct fill fill = fill_of(memory_, 85);
    return FN(cuGraphExecMemsetNodeSetParams)(exec_, node_, &fill, elsewhere);
}
static int instantiate(void) { return FN(cuGraphInstantiateWithFlags)(&exec_, graph_, 0ul); }
static int copy_params(void) {
    struct copy copy = copy_of(memory_, other_);
    return FN(cuGraphExecMemcpyNodeSetParams)(exec_, node_, &copy, context);
}
static int fill_params(void) {
    struct fill fill = fill_of(memory_, 78);
    return FN(cuGraphExecMemsetNodeSetParams)(exec_, node_, &fill, context);
}
static int update(void) {
    size_t info[3];
    return FN(cuGraphExecUpdate_v2)(exec_, graph_, info);
}
/* What is submitted to the stream that captures; without a capture, work waits for the lock anyway. */
static int capture_copy(void) { return FN(cuMemcpyDtoDAsync_v2)(other_, memory_, BYTES, capturing_); }
static int capture_fill(void) { return FN(cuMemsetD32Async)(memory_, 79, WORDS, capturing_); }
static int capture_kernel(void) { return launch(memory_, WORDS, 10, capturing_); }

static void nothing(void) {}
static void a_graph(void) { CHECK(new_graph()); }
static void a_copy(void) { CHECK(new_graph()); CHECK(copy_node()); }
static void a_fill(void) { CHECK(new_graph()); CHECK(fill_node()); }
static void an_exec_copy(void) { a_copy(); CHECK(instantiate()); }
static void an_exec_fill(void) { a_fill(); CHECK(instantiate()); }

enum { ANSWERS, BUILDS, CAPTURES };
static const struct call { const char *name; int (*make)(void); void (*before)(void); int kind; uint32_t in_memory, in_other; } CALLS[] = {
    /* Which values the words of both have after the graph, where they had 10 and 20. */
    {"cuPointerGetAttribute", attributes, nothing, ANSWERS, 10, 20},
    {"cuMemGetAddressRange", range, nothing, ANSWERS, 10, 20},
    {"cuMemGetAccess", access_of, nothing, ANSWERS, 10, 20},
    {"cuGraphAddMemcpyNode", copy_node, a_graph, BUILDS, 10, 10},
    {"cuGraphAddMemsetNode", fill_node, a_graph, BUILDS, 77, 20},
    {"cuGraphAddNode of a copy", any_copy_node, a_graph, BUILDS, 10, 10},
    {"cuGraphAddNode of a fill", any_fill_node, a_graph, BUILDS, 80, 20},
    {"cuGraphAddNode_v2", any_node_with_data, a_graph, BUILDS, 10, 10},
    {"cuGraphAddMemsetNode without a context", nameless_fill_node, a_graph, BUILDS, 81, 20},
    {"cuGraphMemsetNodeSetParams", set_fill, a_fill, BUILDS, 82, 20},
    {"cuGraphMemcpyNodeSetParams", set_copy, a_copy, BUILDS, 20, 20},
    {"cuGraphNodeSetParams", set_any, a_fill, BUILDS, 83, 20},
    {"cuGraphInstantiate", instantiate, a_copy, BUILDS, 10, 10},
    {"cuGraphExecNodeSetParams", set_any_in_exec, an_exec_fill, BUILDS, 84, 20},
    {"cuGraphExecMemsetNodeSetParams with another context", set_elsewhere_in_exec, an_exec_fill, BUILDS, 85, 20},
    {"cuGraphExecMemcpyNodeSetParams", copy_params, an_exec_copy, BUILDS, 20, 20},
    {"cuGraphExecMemsetNodeSetParams", fill_params, an_exec_fill, BUILDS, 78, 20},
    {"cuGraphExecUpdate", update, an_exec_copy, BUILDS, 10, 10},
    {"cuMemcpyDtoDAsync", capture_copy, nothing, CAPTURES, 10, 10},
    {"cuMemsetD32Async", capture_fill, nothing, CAPTURES, 79, 20},
    {"cuLaunchKernel", capture_kernel, nothing, CAPTURES, 11, 20},
};
static const char *const MODES[] = {"none", "global", "thread-local", "relaxed"};

static void wait_until_parked(int number) {
    char path[512];
    const char *parked = getenv("PARKED");
    if (!parked) return;
    snprintf(path, sizeof path, "%s.%d", parked, number);
    while (access(path, F_OK) != 0) usleep(500);
}

int main(void) {
    start();
    load_kernel();
    CHECK(FN(cuStreamCreate)(&work_, 1));
    CHECK(FN(cuStreamCreate)(&capturing_, 1));
    memory_ = alloc(BYTES), other_ = alloc(BYTES);
    int number = 0;
    for (int mode = 0; mode < 4; mode++)
        for (unsigned i = 0; i < sizeof CALLS / sizeof *CALLS; i++) {
            const struct call *call = &CALLS[i];
            void *captured = NULL;
            /* Work without a capture waits for the lock anyway; instantiating breaks the thread's capture unless that is relaxed. */
            if (mode == 0 && call->kind == CAPTURES) continue;
            if ((mode == 1 || mode == 2) && call->make == instantiate) continue;
            graph_ = exec_ = NULL;
            said[0] = 0;
            CHECK(FN(cuMemsetD32Async)(memory_, 10, WORDS, work_));
            CHECK(FN(cuMemsetD32Async)(other_, 20, WORDS, work_));
            CHECK(FN(cuStreamSynchronize)(work_));
            call->before();
            if (mode) CHECK(FN(cuStreamBeginCapture_v2)(capturing_, mode - 1));
            printf("ask %d\n", number), fflush(stdout);
            wait_until_parked(number);
            int answer = call->make();
            printf("said %d %s %s %d%s\n", number++, MODES[mode], call->name, answer, said), fflush(stdout);
            /* The capture is whole. */
            if (mode) CHECK(FN(cuStreamEndCapture)(capturing_, &captured));
            /* It waits for the lock, if it was away. */
            CHECK(launch(0, 0, 0, work_));
            CHECK(FN(cuStreamSynchronize)(work_));
            if (call->kind == CAPTURES) graph_ = captured, captured = NULL;
            if (call->kind != ANSWERS) {
                if (!exec_) CHECK(instantiate());
                CHECK(FN(cuGraphLaunch)(exec_, work_));
                CHECK(FN(cuStreamSynchronize)(work_));
                CHECK(FN(cuGraphExecDestroy)(exec_));
                CHECK(FN(cuGraphDestroy)(graph_));
            }
            if (captured) CHECK(FN(cuGraphDestroy)(captured));
            EXPECT(holds(memory_, BYTES, MIB, call->in_memory));
            EXPECT(holds(other_, BYTES, MIB, call->in_other));
        }
    printf("over\n"), fflush(stdout);
    return 0;
}
