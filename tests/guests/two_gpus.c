/* 600 MiB on each of two GPUs, and a kernel on both in each round; every word must count every round. */
#include "guest.h"
#define WORDS (600 * MIB / 4)
int main(void) {
    CHECK(FN(cuInit)(0));
    void *contexts[2], *functions[2];
    uint64_t memory[2];
    for (int i = 0; i < 2; i++) {
        CHECK(FN(cuDevicePrimaryCtxRetain)(&contexts[i], i));
        CHECK(FN(cuCtxSetCurrent)(contexts[i]));
        load_kernel();
        functions[i] = step_function;
        memory[i] = alloc(600 * MIB);
        CHECK(FN(cuMemsetD32_v2)(memory[i], 0, WORDS));
    }
    uint32_t rounds = 0;
    do {
        for (int i = 0; i < 2; i++) {
            CHECK(FN(cuCtxSetCurrent)(contexts[i]));
            step_function = functions[i];
            CHECK(launch(memory[i], WORDS, 2000, NULL));
        }
        CHECK(FN(cuCtxSynchronize)());
        rounds++;
    } while (goes_on());
    for (int i = 0; i < 2; i++) {
        CHECK(FN(cuCtxSetCurrent)(contexts[i]));
        for (size_t at = 0; at < 600 * MIB; at += 50 * MIB) {
            uint32_t words[64];
            CHECK(FN(cuMemcpyDtoH_v2)(words, memory[i] + at, sizeof words));
            for (int j = 0; j < 64; j++)
                if (words[j] != rounds) { fprintf(stderr, "%u of %u rounds on %d\n", words[j], rounds, i); return 1; }
        }
    }
    return 0;
}
