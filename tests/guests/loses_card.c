/* The first card is lost while memory is away: each call that works on it says what it answers. With two cards the program goes on
   with the other one. It begins to work when the file exists that PARKED names, and ends when the one exists that OVER names. */
#include "guest.h"
#define BYTES (8 * MIB)
static void *contexts[2], *functions[2], *streams[2];
static uint64_t memory[2][2];
static void until(const char *file) {
    for (const char *name = getenv(file); name && access(name, F_OK) != 0;) usleep(500);
}
static void use(int card) {
    CHECK(FN(cuCtxSetCurrent)(contexts[card]));
    step_function = functions[card];
}
static void said(const char *what, int answer) {
    printf("%s %d\n", what, answer), fflush(stdout);
}
int main(int count, char **arguments) {
    int cards = count > 1 ? atoi(arguments[1]) : 1;
    uint32_t words[4];
    uint64_t more = 0;
    void *graph, *node;
    CHECK(FN(cuInit)(0));
    for (int i = 0; i < cards; i++) {
        CHECK(FN(cuDevicePrimaryCtxRetain)(&contexts[i], i));
        CHECK(FN(cuCtxSetCurrent)(contexts[i]));
        load_kernel();
        functions[i] = step_function;
        CHECK(FN(cuStreamCreate)(&streams[i], 1));
        for (int j = 0; j < 2; j++) {
            memory[i][j] = alloc(BYTES);
            CHECK(FN(cuMemsetD32_v2)(memory[i][j], 7 + j, BYTES / 4));
        }
        /* From here on the thread knows its streams. */
        CHECK(launch(memory[i][0], 4, 10, NULL));
        CHECK(FN(cuCtxSynchronize)());
        CHECK(launch(memory[i][1], 4, 10, streams[i]));
        CHECK(FN(cuCtxSynchronize)());
    }
    said("ask", 0);
    until("PARKED");
    if (cards > 1) {
        use(1);
        said("other", launch(memory[1][0], 4, 10, NULL));
    }
    use(0);
    said("launch", launch(memory[0][1], 4, 10, streams[0]));
    said("launch", launch(memory[0][0], 4, 10, NULL));
    said("fill", FN(cuMemsetD32Async)(memory[0][0], 9, 4ul, streams[0]));
    said("copy", FN(cuMemcpyDtoH_v2)(words, memory[0][0], sizeof words));
    said("allocation", FN(cuMemAlloc_v2)(&more, BYTES));
    said("allocation", FN(cuMemAlloc_v2)(&more, 512ul));
    said("wait", FN(cuCtxSynchronize)());
    if (cards > 1) {
        use(1);
        said("other", launch(memory[1][1], 4, 10, streams[1]));
        said("other", FN(cuCtxSynchronize)());
        EXPECT(counts(memory[1][0], 9) && counts(memory[1][1], 10));
    }
    said("over", 0);
    until("OVER");
    _exit(0);
}
