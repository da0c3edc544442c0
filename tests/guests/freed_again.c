/* Memory of more than the card in sum, each piece freed in the order of a stream that has reached the free, while a function of the host
   waits for the thread that allocates the next: memory freed only where the device has nothing to do would fill the card. What the stream
   has not reached yet is not allocated again: work before the free writes to it. */
#include "guest.h"
#include "waits.h"
#define BYTES (64 * MIB)
#define ROUNDS 40
int main(void) {
    void *stream, *waits;
    uint64_t before, other;
    uint32_t word = 0;
    start();
    CHECK(FN(cuStreamCreate)(&stream, 1));
    CHECK(FN(cuStreamCreate)(&waits, 1));
    let_wait(1, waits);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        uint64_t memory = alloc(BYTES);
        uint32_t last = ~round;
        CHECK(FN(cuMemsetD32Async)(memory, round, BYTES / 4, stream));
        CHECK(FN(cuMemcpyDtoHAsync_v2)(&last, memory + BYTES - 4, 4, stream));
        CHECK(FN(cuMemFreeAsync)(memory, stream));
        CHECK(FN(cuStreamSynchronize)(stream));
        EXPECT(last == round);
        /* It is freed: a second free is an error. */
        if (round % 8 == 0) EXPECT(FN(cuMemFreeAsync)(memory, stream) != 0);
    }
    ready = 1;
    CHECK(FN(cuStreamSynchronize)(waits));
    before = alloc(BYTES);
    let_wait(2, stream);
    CHECK(FN(cuMemsetD32Async)(before, 1, BYTES / 4, stream));
    CHECK(FN(cuMemFreeAsync)(before, stream));
    other = alloc(BYTES);
    CHECK(FN(cuMemsetD32Async)(other, 2, BYTES / 4, waits));
    CHECK(FN(cuStreamSynchronize)(waits));
    ready = 2;
    CHECK(FN(cuStreamSynchronize)(stream));
    CHECK(FN(cuMemcpyDtoH_v2)(&word, other, 4));
    EXPECT(word == 2);
    return 0;
}
