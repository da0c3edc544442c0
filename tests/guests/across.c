/* Copies without peer access, which the driver makes with memory of cuMemAlloc: between two cards, and between the host and a card that is not
   current; of large memory and of small, of lines, in streams and at once. `cards`: only those of bytes between cards. `graph`: those of a graph. */
#include "guest.h"
struct plane { size_t x, y; unsigned kind; const void *host; uint64_t device; void *array; size_t pitch; };
struct copy { struct plane from, to; size_t width, height; };
struct space { size_t x, y, z, level, kind; const void *host; uint64_t device; void *array, *reserved; size_t pitch, height; };
struct volume { struct space from, to; size_t width, height, depth; };
static uint32_t host_[9 * MIB];
static void holds_there(void *on, uint64_t at, size_t bytes, uint32_t value) {
    if (on) CHECK(FN(cuCtxSetCurrent)(on));
    holds_in_each_word(at, bytes, value);
    if (on) CHECK(FN(cuCtxSetCurrent)(context));
}
static void fill(void *on, uint64_t at, size_t words, uint32_t value) {
    CHECK(FN(cuCtxSetCurrent)(on));
    CHECK(FN(cuMemsetD32_v2)(at, value, words));
    CHECK(FN(cuCtxSynchronize)());
    CHECK(FN(cuCtxSetCurrent)(context));
}
/* Copies that a graph makes, in one of six ways: captured in one of three modes, or added as a node. */
static void by_graph(void *other, void *stream, int way) {
    size_t bytes = 4 * MIB;
    void *graph, *exec, *node;
    uint64_t here = alloc(bytes), there;
    uint32_t *host;
    CHECK(FN(cuMemHostAlloc)(&host, bytes, 0));
    memset(host, 0, bytes);
    CHECK(FN(cuCtxSetCurrent)(other));
    there = alloc(bytes);
    fill(other, there, bytes / 4, way + 1);
    struct volume copy = {.from = {.kind = 2, .device = there, .pitch = bytes, .height = 1}, .to = {.kind = 2, .device = here, .pitch = bytes, .height = 1}, .width = bytes, .height = 1, .depth = 1};
    struct { int kind, reserved[3], flags[2]; void *context; struct volume copy; uint64_t rest[4]; } params = {.kind = 1, .context = context, .copy = copy};
    if (way < 3) {
        CHECK(FN(cuStreamBeginCapture_v2)(stream, way));
        CHECK(FN(cuMemcpyDtoDAsync_v2)(here, there, bytes, stream));
        CHECK(FN(cuMemcpyDtoHAsync_v2)(host, there, bytes, stream));
        CHECK(FN(cuStreamEndCapture)(stream, &graph));
    } else {
        CHECK(FN(cuGraphCreate)(&graph, 0));
        if (way == 3) CHECK(FN(cuGraphAddMemcpyNode)(&node, graph, NULL, 0ul, &copy, context));
        if (way == 4) CHECK(FN(cuGraphAddMemcpyNode)(&node, graph, NULL, 0ul, &copy, NULL));
        if (way == 5) CHECK(FN(cuGraphAddNode)(&node, graph, NULL, 0ul, &params));
    }
    CHECK(FN(cuGraphInstantiateWithFlags)(&exec, graph, 0ul));
    CHECK(FN(cuGraphLaunch)(exec, stream));
    CHECK(FN(cuStreamSynchronize)(stream));
    holds_in_each_word(here, bytes, way + 1);
    for (size_t i = 0; way < 3 && i < bytes / 4; i++) EXPECT(host[i] == (uint32_t)way + 1);
    CHECK(FN(cuMemFree_v2)(here));
    CHECK(FN(cuMemFree_v2)(there));
}
int main(int count, char **arguments) {
    void *other, *stream;
    start();
    CHECK(FN(cuStreamCreate)(&stream, 1));
    CHECK(FN(cuDevicePrimaryCtxRetain)(&other, 1));
    int round = 0, cards = count > 1 && !strcmp(arguments[1], "cards");
    void *elsewhere = cards ? other : NULL;
    if (count > 2 && !strcmp(arguments[1], "graph")) {
        by_graph(other, stream, atoi(arguments[2]));
        return 0;
    }
    for (size_t words = 9 * MIB; words >= 1024; words /= 9 * 1024, round += 20) {
        CHECK(FN(cuCtxSetCurrent)(other));
        uint64_t there = alloc(4 * words), too = alloc(4 * words);
        CHECK(FN(cuCtxSetCurrent)(context));
        fill(other, there, words, round + 1);
        /* At first the program has nothing on this card. */
        holds_there(elsewhere, there, 4 * words, round + 1);
        uint64_t here = alloc(4 * words);
        CHECK(FN(cuMemcpyDtoD_v2)(here, there, 4 * words));
        holds_in_each_word(here, 4 * words, round + 1);
        fill(context, here, words, round + 2);
        CHECK(FN(cuMemcpyDtoDAsync_v2)(there, here, 4 * words, stream));
        CHECK(FN(cuStreamSynchronize)(stream));
        holds_there(elsewhere, there, 4 * words, round + 2);
        CHECK(FN(cuMemcpyAsync)(too, there, 4 * words, stream));
        CHECK(FN(cuStreamSynchronize)(stream));
        holds_there(elsewhere, too, 4 * words, round + 2);
        fill(other, too, words, round + 3);
        CHECK(FN(cuMemcpy)(here, too, 4 * words));
        holds_in_each_word(here, 4 * words, round + 3);
        if (cards) continue;
        for (size_t i = 0; i < words; i++) host_[i] = round + 4;
        CHECK(FN(cuMemcpyHtoD_v2)(there, host_, 4 * words));
        holds_there(elsewhere, there, 4 * words, round + 4);
        struct copy lines = {.from = {.kind = 2, .device = there, .pitch = 256}, .to = {.kind = 2, .device = here, .pitch = 256}, .width = 256, .height = words / 64};
        CHECK(FN(cuMemcpy2DAsync_v2)(&lines, stream));
        CHECK(FN(cuStreamSynchronize)(stream));
        holds_in_each_word(here, 4 * words, round + 4);
    }
    return 0;
}
