/* Memory is freed in stream order, and then a kernel breaks the context: an allocation of as many bytes is told so. */
#include "guest.h"
#define BYTES (64 * MIB)
int main(void) {
    void *stream;
    uint64_t memory;
    start();
    load_kernel();
    CHECK(FN(cuStreamCreate)(&stream, 1));
    memory = alloc(BYTES);
    CHECK(launch(memory, 4, 10, stream));
    CHECK(FN(cuMemFreeAsync)(memory, stream));
    CHECK(FN(cuStreamSynchronize)(stream));
    CHECK(launch(0x10000, 4, 10, stream));
    EXPECT(FN(cuStreamSynchronize)(stream) == 700);
    EXPECT(FN(cuMemAlloc_v2)(&memory, BYTES) == 700);
    return 0;
}
