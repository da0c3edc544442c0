/* Memory on each of several cards (GPUS), and a kernel on all of them in each round. */
#include "guest.h"
#define BYTES (512 * MIB)
#define MOST 16
int main(void) {
    int gpus = atoi(getenv("GPUS"));
    void *contexts[MOST], *functions[MOST];
    uint64_t memory[MOST];
    EXPECT(gpus > 0 && gpus <= MOST);
    CHECK(FN(cuInit)(0));
    for (int i = 0; i < gpus; i++) {
        CHECK(FN(cuDevicePrimaryCtxRetain)(&contexts[i], i));
        CHECK(FN(cuCtxSetCurrent)(contexts[i]));
        load_kernel();
        functions[i] = step_function;
        memory[i] = alloc(BYTES);
    }
    for (int i = 0; i < gpus; i++) {
        CHECK(FN(cuCtxSetCurrent)(contexts[i]));
        CHECK(FN(cuMemsetD32_v2)(memory[i], 0, BYTES / 4));
    }
    do {
        for (int i = 0; i < gpus; i++) {
            CHECK(FN(cuCtxSetCurrent)(contexts[i]));
            step_function = functions[i];
            CHECK(launch(memory[i], BYTES / 4, 500, NULL));
        }
        for (int i = 0; i < gpus; i++) {
            CHECK(FN(cuCtxSetCurrent)(contexts[i]));
            CHECK(FN(cuCtxSynchronize)());
        }
    } while (goes_on());
    return 0;
}
