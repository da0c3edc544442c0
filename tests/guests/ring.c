/* GPUS cards, each of which works on the memory of the next one by peer access, in rounds in order of events: kernels, copies with access and
   without, memory that comes later, and access that is taken away and given again. Each word is checked in each round. */
#include "guest.h"
#define WORDS (9 * MIB)
#define MOST 8
static int cards_;
static void *contexts_[MOST], *functions_[MOST], *streams_[MOST], *events_[MOST];
static uint64_t memory_[MOST], later_[MOST];
static void on(int card) { CHECK(FN(cuCtxSetCurrent)(contexts_[card])); }
static int next(int card) { return (card + 1) % cards_; }
static int before(int card) { return (card + cards_ - 1) % cards_; }
static uint64_t filled(int card, size_t words, uint32_t value) {
    on(card);
    uint64_t memory = alloc(4 * words);
    CHECK(FN(cuMemsetD32_v2)(memory, value, words));
    CHECK(FN(cuCtxSynchronize)());
    return memory;
}
int main(void) {
    uint32_t value = 5;
    cards_ = atoi(getenv("GPUS"));
    EXPECT(cards_ > 1 && cards_ <= MOST);
    CHECK(FN(cuInit)(0));
    for (int i = 0; i < cards_; i++) {
        CHECK(FN(cuDevicePrimaryCtxRetain)(&contexts_[i], i));
        on(i);
        load_kernel();
        functions_[i] = step_function;
        CHECK(FN(cuStreamCreate)(&streams_[i], 1));
        CHECK(FN(cuEventCreate)(&events_[i], 2));
    }
    for (int i = 0; i < cards_; i++) {
        memory_[i] = filled(i, WORDS, value);
        on(i);
        CHECK(FN(cuCtxEnablePeerAccess)(contexts_[next(i)], 0));
    }
    for (int round = 0; round == 0 || goes_on(); round++) {
        /* A round adds one to all memory, in the order of the ring. */
        for (int i = 0; i < cards_; i++) {
            on(i);
            if (i > 0) CHECK(FN(cuStreamWaitEvent)(streams_[i], events_[before(i)], 0));
            CHECK(launch_of(functions_[i], memory_[next(i)], WORDS, 200, streams_[i]));
            CHECK(FN(cuEventRecord)(events_[i], streams_[i]));
        }
        CHECK(FN(cuStreamSynchronize)(streams_[cards_ - 1]));
        value++;
        /* Memory that comes now is reached, and goes. */
        size_t words = round % 2 ? 1024 : WORDS / 3 + 256 * round % 4096;
        for (int i = 0; i < cards_; i++) later_[i] = filled(i, words, round);
        for (int i = 0; i < cards_; i++) {
            on(i);
            CHECK(launch_of(functions_[i], later_[next(i)], words, 10, streams_[i]));
            CHECK(FN(cuStreamSynchronize)(streams_[i]));
        }
        /* The card before, which has no access but in a ring of two, copies too. */
        for (int i = 0; i < cards_; i++) {
            on(i);
            holds_in_each_word(memory_[i], 4ul * WORDS, value);
            holds_in_each_word(later_[i], 4 * words, round + 1);
            CHECK(FN(cuMemcpyDtoDAsync_v2)(later_[i], memory_[before(i)], 4 * words, streams_[i]));
            CHECK(FN(cuStreamSynchronize)(streams_[i]));
            holds_in_each_word(later_[i], 4 * words, value);
            CHECK(FN(cuMemcpyPeer)(later_[i], contexts_[i], memory_[next(i)], contexts_[next(i)], 4 * words));
            holds_in_each_word(later_[i], 4 * words, value);
        }
        for (int i = 0; i < cards_; i++) {
            on(i);
            CHECK(FN(cuMemFree_v2)(later_[i]));
        }
        int giver = round % cards_;
        on(giver);
        CHECK(FN(cuCtxDisablePeerAccess)(contexts_[next(giver)]));
        CHECK(FN(cuCtxEnablePeerAccess)(contexts_[next(giver)], 0));
    }
    return 0;
}
