/* A fill or a copy on the card returns before it is done; it must not wait only because the memory is managed. */
#include "guest.h"
static volatile int flag;
static void wait_for_flag(void *data) { (void)data; while (!flag) usleep(100); }
int main(void) {
    start();
    load_kernel();
    uint32_t words[16];
    uint64_t memory = alloc(4 * MIB);
    CHECK(FN(cuMemsetD32_v2)(memory, 1, MIB));
    CHECK(FN(cuLaunchHostFunc)(NULL, wait_for_flag, NULL));
    CHECK(FN(cuMemsetD32_v2)(memory + 1024, 7, MIB - 256));
    CHECK(FN(cuMemcpyDtoD_v2)(memory + 2 * MIB, memory, MIB));
    flag = 1;
    CHECK(launch(memory, MIB, 10, NULL));
    CHECK(FN(cuMemcpyDtoH_v2)(words, memory + 1008, sizeof words));
    for (int i = 0; i < 16; i++) EXPECT(words[i] == (i < 4 ? 2 : 8));
    CHECK(FN(cuMemcpyDtoH_v2)(words, memory + 2 * MIB + 1008, sizeof words));
    for (int i = 0; i < 16; i++) EXPECT(words[i] == (i < 4 ? 2 : 8));
    /* Data that the host can see is there when the copy returns. */
    uint64_t seen;
    CHECK(FN(cuMemAllocManaged)(&seen, MIB, 1));
    CHECK(launch(memory, MIB, 1000000, NULL));
    CHECK(FN(cuMemcpyDtoD_v2)(seen, memory, 64));
    CHECK(FN(cuStreamQuery)(NULL));
    return 0;
}
