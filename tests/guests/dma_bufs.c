/* Memory that other devices reach by a descriptor (dma-buf). The argument names what is tried; the answers are those of a card's driver
 * (tests/gpu/probes/replace_probe.cpp), natively and where the library maps the memory. */
#include "guest.h"
#define BYTES (36 * MIB)
static const int ON_CARD[8] = {1, 0, 1, 0}, READ_WRITE[3] = {1, 0, 3};
static int descriptor = -1;
static int describe(uint64_t at, size_t bytes) { return FN(cuMemGetHandleForAddressRange)(&descriptor, at, bytes, 1, 0ul); }
/* The word at an offset of the range, as another device reads it. */
static uint32_t seen(size_t offset) {
    uint32_t word;
    CHECK(FN(nvsimDeviceRead)(&word, descriptor, offset, sizeof word));
    return word;
}
static uint64_t filled(size_t bytes, uint32_t value) {
    uint64_t at = alloc(bytes);
    CHECK(FN(cuMemsetD32_v2)(at, value, bytes / 4));
    CHECK(FN(cuCtxSynchronize)());
    return at;
}
static uint64_t mapped(size_t bytes) {
    uint64_t at, handle;
    CHECK(FN(cuMemAddressReserve)(&at, bytes, 0ul, 0ul, 0ul));
    CHECK(FN(cuMemCreate)(&handle, bytes, ON_CARD, 0ul));
    CHECK(FN(cuMemMap)(at, bytes, 0ul, handle, 0ul));
    CHECK(FN(cuMemSetAccess)(at, bytes, READ_WRITE, 1ul));
    CHECK(FN(cuMemsetD32_v2)(at, 6u, bytes / 4));
    CHECK(FN(cuCtxSynchronize)());
    return at;
}

static void answers(void) {
    start();
    uint64_t a = filled(BYTES, 5), small = filled(8192, 7), ours = mapped(8 * MIB), managed;
    CHECK(describe(a, BYTES));
    EXPECT(seen(0) == 5 && seen(BYTES - 4) == 5);
    close(descriptor);
    CHECK(describe(a + 3 * MIB, MIB));
    EXPECT(seen(4096) == 5);
    CHECK(FN(cuMemsetD32_v2)(a, 9u, BYTES / 4));
    CHECK(FN(cuCtxSynchronize)());
    EXPECT(seen(4096) == 9);
    close(descriptor);
    CHECK(describe(small, 8192ul));
    EXPECT(seen(0) == 7 && seen(8188) == 7);
    close(descriptor);
    CHECK(describe(ours, 8 * MIB));
    EXPECT(seen(0) == 6);
    close(descriptor);
    EXPECT(describe(a + 512, 4096ul) == 1 && describe(a, 512ul) == 1 && describe(a, 0ul) == 1);
    EXPECT(describe(a, BYTES + 2 * MIB) == 1);
    EXPECT(FN(cuMemGetHandleForAddressRange)(&descriptor, a, 4096ul, 2, 0ul) == 1);
    EXPECT(FN(cuMemGetHandleForAddressRange)(&descriptor, a, 4096ul, 1, 1ul) == 801);
    CHECK(FN(cuMemAllocManaged)(&managed, 4 * MIB, 1));
    EXPECT(describe(managed, 4 * MIB) == 1);
    CHECK(FN(cuMemFree_v2)(a));
    EXPECT(describe(a, 4096ul) == 1);
}

/* The words of the range are at their place after each round, while other memory of the program moves. */
static void turns(void) {
    start();
    load_kernel();
    uint64_t moves = filled(400 * MIB, 0), shared = filled(BYTES, 0);
    CHECK(describe(shared, BYTES));
    uint32_t rounds = 0;
    do {
        CHECK(launch(moves, 400 * MIB / 4, 1000, NULL));
        CHECK(launch(shared, BYTES / 4, 1000, NULL));
        CHECK(FN(cuCtxSynchronize)());
        rounds++;
        EXPECT(seen(0) == rounds && seen(20 * MIB) == rounds && seen(BYTES - 4) == rounds);
        usleep(1000);
        EXPECT(seen(4 * MIB) == rounds);
    } while (goes_on());
    EXPECT(holds(moves, 400 * MIB, 2 * MIB, rounds) && holds(shared, BYTES, 2 * MIB, rounds));
}

/* Managed memory has no such descriptor. What is allocated afterwards has. */
static void with_managed_memory(void) {
    start();
    uint64_t first = alloc(4 * MIB);
    EXPECT(describe(first, 4 * MIB) == 1);
    CHECK(describe(filled(4 * MIB, 3), 4 * MIB));
    EXPECT(seen(0) == 3);
}

/* Other processes may get what another device reaches: the device sees the program's words afterwards, too. */
static int give(uint64_t at) { char handle[64]; return FN(cuIpcGetMemHandle)(handle, at); }
static void set_word(uint64_t at, size_t bytes, uint32_t value) {
    CHECK(FN(cuMemsetD32_v2)(at, value, bytes / 4));
    CHECK(FN(cuCtxSynchronize)());
}
static unsigned synchronous(uint64_t at) {
    unsigned value = 7;
    CHECK(FN(cuPointerGetAttribute)(&value, 6, at));
    return value;
}
static void shared(void) {
    start();
    uint64_t a = filled(BYTES, 5), b = filled(BYTES, 6), one = filled(4096, 1), two = filled(4096, 2);
    unsigned on = 1;
    CHECK(describe(a, BYTES));
    CHECK(give(a));
    set_word(a, BYTES, 9);
    EXPECT(seen(0) == 9 && seen(BYTES - 4) == 9);
    close(descriptor);
    CHECK(FN(cuPointerSetAttribute)(&on, 6, b));
    CHECK(give(b));
    EXPECT(synchronous(b) == 1);
    CHECK(describe(one, 4096));
    CHECK(give(two));
    set_word(one, 4096, 3);
    EXPECT(seen(0) == 3);
    holds_in_each_word(two, 4096, 2);
}

/* Work runs all the while that the device comes to reach the memory. The argument is the answer to the call for a handle. */
static void shared_in_use(int answer) {
    start();
    load_kernel();
    uint64_t a = filled(BYTES, 5);
    CHECK(launch(a, BYTES / 4, 1500 * 1000, NULL));
    CHECK(describe(a, BYTES));
    CHECK(FN(cuCtxSynchronize)());
    EXPECT(give(a) == answer);
    set_word(a, BYTES, 9);
    EXPECT(seen(0) == 9 && seen(BYTES - 4) == 9);
}

int main(int argc, char **argv) {
    struct { const char *name; void (*does)(void); } all[] = {{"answers", answers}, {"turns", turns}, {"managed", with_managed_memory}, {"shared", shared}};
    if (argc > 2 && !strcmp("shared in use", argv[1])) { shared_in_use(atoi(argv[2])); return 0; }
    for (int i = 0; i < 4; i++)
        if (argc > 1 && !strcmp(all[i].name, argv[1])) { all[i].does(); return 0; }
    return 2;
}
