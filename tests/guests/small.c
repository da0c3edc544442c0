/* Small allocations: they are aligned as the driver's, no two share a byte, their words survive turns, and questions about
 * a pointer are answered about its own allocation. Some are freed while a kernel uses them, and their bytes come again. */
#include "guest.h"
#define KEPT (448 * MIB)
#define COUNT 400
#define RANGE_START 11
#define RANGE_SIZE 12
#define BUFFER_ID 7
struct small { uint64_t at, id; size_t bytes; uint32_t value; };
static struct small all[COUNT];
static int count = 40;
static unsigned seed = 5;
static int slabs;
static void *stream;

static uint64_t attribute(int name, uint64_t pointer) {
    uint64_t value = 0;
    CHECK(FN(cuPointerGetAttribute)(&value, name, pointer));
    return value;
}
static void make(struct small *s) {
    static const size_t sizes[] = {4, 64, 400, 512, 1000, 4096, 20000, 70000, 300000, 2 * MIB - 4};
    int pick = rand_r(&seed) % 100;
    s->bytes = sizes[pick < 95 ? pick % 8 : pick < 99 ? 8 : 9] & ~3ul;
    s->at = alloc(s->bytes);
    EXPECT(s->at % 512 == 0);
    s->value = rand_r(&seed);
    CHECK(FN(cuMemsetD32Async)(s->at, s->value, s->bytes / 4, stream));
    if (slabs) {
        uint64_t id = attribute(BUFFER_ID, s->at);
        EXPECT(id != s->id);
        s->id = id;
    }
}
static void check(const struct small *s) {
    static uint32_t words[2 * MIB / 4];
    CHECK(FN(cuMemcpyDtoH_v2)(words, s->at, s->bytes));
    for (size_t i = 0; i < s->bytes / 4; i++)
        if (words[i] != s->value) {
            fprintf(stderr, "word %zu of %zu bytes at %#lx: %u, not %u\n", i, s->bytes, (unsigned long)s->at, words[i], s->value);
            _exit(1);
        }
}
/* What is known of a small allocation is the same wherever its memory is. */
static void ask(const struct small *s) {
    uint64_t base, end = s->at + s->bytes - 1;
    size_t bytes;
    CHECK(FN(cuMemGetAddressRange_v2)(&base, &bytes, end));
    EXPECT(base == s->at && bytes >= s->bytes);
    if (!slabs) return;
    EXPECT(bytes == s->bytes && attribute(RANGE_START, end) == s->at && attribute(RANGE_SIZE, end) == s->bytes);
    EXPECT(attribute(BUFFER_ID, end) == s->id && attribute(1, end) == (uint64_t)context);
}

int main(int argc, char **argv) {
    slabs = argc > 1 && !strcmp(argv[1], "slabs");
    if (slabs) count = COUNT;
    start();
    load_kernel();
    CHECK(FN(cuStreamCreate)(&stream, 1));
    uint64_t kept = alloc(KEPT), part = alloc(4096);
    void *capturing, *graph;
    CHECK(FN(cuStreamCreate)(&capturing, 1));
    /* A free waits for the work before it. Where it gives up beside a capture, the bytes do not come again before that work is over. */
    for (int captures = 0; captures < 2; captures++) {
        if (captures) CHECK(FN(cuStreamBeginCapture_v2)(capturing, 2));
        CHECK(launch(part, 1024, 200000, stream));
        CHECK(FN(cuMemFree_v2)(part));
        EXPECT(captures || FN(cuStreamQuery)(stream) == 0);
        uint64_t next = alloc(4096);
        EXPECT(FN(cuStreamQuery)(stream) == 0 || next != part);
        if (captures) {
            CHECK(FN(cuStreamEndCapture)(capturing, &graph));
            CHECK(FN(cuGraphDestroy)(graph));
        }
        CHECK(FN(cuStreamSynchronize)(stream));
        part = next;
    }
    CHECK(FN(cuMemFree_v2)(part));
    /* A slab is gone when it is empty. */
    size_t before = free_bytes();
    uint64_t one = alloc(100), two = alloc(100);
    size_t with_two = free_bytes();
    if (slabs) {
        EXPECT(before - with_two == 2 * MIB && two - one == 512);
        EXPECT(FN(cuMemFree_v2)(one + 64) != 0);
    }
    CHECK(FN(cuMemFree_v2)(one));
    EXPECT(FN(cuMemFree_v2)(one) != 0);
    if (slabs) EXPECT(free_bytes() == with_two);
    CHECK(FN(cuMemFree_v2)(two));
    EXPECT(free_bytes() == before);
    CHECK(FN(cuMemsetD32_v2)(kept, 0, KEPT / 4));
    /* A fill may return before it is done, and non-blocking streams do not wait for it. */
    CHECK(FN(cuCtxSynchronize)());
    for (int i = 0; i < count; i++) make(&all[i]);
    for (int i = 0; i < count; i++)
        for (int j = 0; j < i; j++) EXPECT(all[i].at + all[i].bytes <= all[j].at || all[j].at + all[j].bytes <= all[i].at);
    uint32_t rounds = 0;
    do {
        for (int i = 0; i < 20; i++) {
            struct small *s = &all[rand_r(&seed) % count];
            CHECK(launch(s->at, s->bytes / 4, 50, stream));
            s->value++;
        }
        CHECK(launch(kept, KEPT / 4, 1000, stream));
        /* These may be in use, and others get their bytes. */
        for (int i = 0; i < 5; i++) {
            struct small *s = &all[rand_r(&seed) % count];
            CHECK(launch(s->at, s->bytes / 4, 300, stream));
            if (i % 2) CHECK(FN(cuMemFree_v2)(s->at));
            else CHECK(FN(cuMemFreeAsync)(s->at, stream));
            make(s);
        }
        ask(&all[rand_r(&seed) % count]);
        CHECK(FN(cuStreamSynchronize)(stream));
        if (++rounds % 8 == 0)
            for (int i = 0; i < count; i++) check(&all[i]);
        else
            check(&all[rand_r(&seed) % count]);
    } while (goes_on());
    for (int i = 0; i < count; i++) {
        check(&all[i]);
        ask(&all[i]);
        CHECK(FN(cuMemFree_v2)(all[i].at));
    }
    EXPECT(holds(kept, KEPT, 2 * MIB, rounds));
    EXPECT(free_bytes() == before);
    return 0;
}
