/* Programs that create and map their memory themselves: as one pool, in segments, at several addresses at a time. Their words
 * count the kernels that ran on them. Each runs until the file exists that STOP names. */
#include "guest.h"
#define BLOCK (2 * MIB)
#define WORDS (BLOCK / 4)
static const int ON_CARD[8] = {1, 0, 1, 0}, FOR_RDMA[8] = {1, 0, 1, 0, 0, 0, 0x100}, SHARED[8] = {1, 1, 1, 0}, READ_WRITE[3] = {1, 0, 3};

static uint64_t create(size_t bytes, const int *properties) {
    uint64_t handle = 0;
    CHECK(FN(cuMemCreate)(&handle, bytes, properties, 0ul));
    return handle;
}
static uint64_t range(size_t bytes) {
    uint64_t at = 0;
    CHECK(FN(cuMemAddressReserve)(&at, bytes, 0ul, 0ul, 0ul));
    return at;
}
static void map(uint64_t at, size_t bytes, uint64_t handle) {
    CHECK(FN(cuMemMap)(at, bytes, 0ul, handle, 0ul));
    CHECK(FN(cuMemSetAccess)(at, bytes, READ_WRITE, 1ul));
}
/* Each block begins with a value of its own. */
static void fill(uint64_t at, size_t bytes, uint32_t value) {
    for (size_t block = 0; block < bytes / BLOCK; block++)
        CHECK(FN(cuMemsetD32_v2)(at + block * BLOCK, value + 100003 * block, (size_t)WORDS));
}
/* All words, where the simulator keeps them all; else some of each block. */
static void check(uint64_t at, size_t bytes, uint32_t value) {
    size_t words = getenv("ALL_WORDS") ? WORDS : 64;
    uint32_t *seen = malloc(words * 4);
    for (size_t block = 0; block < bytes / BLOCK; block++) {
        uint32_t expected = value + 100003 * block;
        CHECK(FN(cuMemcpyDtoH_v2)(seen, at + block * BLOCK, words * 4));
        for (size_t i = 0; i < words; i++)
            if (seen[i] != expected) {
                fprintf(stderr, "word %zu of block %zu at %#lx: %u, not %u\n", i, block, (unsigned long)at, seen[i], expected);
                _exit(1);
            }
    }
    free(seen);
}
static void run(uint64_t at, size_t bytes) { CHECK(launch(at, bytes / 4, 2000, NULL)); }

/* What the driver says of a mapping is the same wherever the memory is; what it refuses it refuses. */
struct asked { uint64_t handle, at, bytes, reserved, length; };
static const int *properties_of_pool;
static volatile int over;
static void *asks(void *argument) {
    struct asked *of = argument;
    CHECK(FN(cuCtxSetCurrent)(context));
    int names[] = {1, 11, 12, 14, 18, 19};
    uint64_t values[] = {0, of->reserved, of->length, properties_of_pool[1], of->bytes, of->at}, value, base;
    unsigned word;
    long times = 0;
    while (!over || times < 10) {
        uint64_t inside = of->at + of->bytes - 5;
        for (int i = 0; i < 6; i++) {
            CHECK(FN(cuPointerGetAttribute)(&value, names[i], inside));
            EXPECT(value == values[i]);
        }
        CHECK(FN(cuPointerGetAttribute)(&word, 2, inside));
        EXPECT(word == 2);
        size_t bytes;
        CHECK(FN(cuMemGetAddressRange_v2)(&base, &bytes, inside));
        EXPECT(base == of->at && bytes == of->bytes);
        CHECK(FN(cuMemGetAccess)(&value, (int[2]){1, 0}, of->at));
        EXPECT(value == 3);
        int properties[8];
        CHECK(FN(cuMemGetAllocationPropertiesFromHandle)(properties, of->handle));
        EXPECT(!memcmp(properties, properties_of_pool, sizeof properties));
        CHECK(FN(cuMemRetainAllocationHandle)(&value, inside));
        EXPECT(value == of->handle);
        CHECK(FN(cuMemRelease)(value));
        EXPECT(FN(cuMemMap)(of->at, of->bytes, 0ul, of->handle, 0ul) == 1);
        EXPECT(FN(cuMemMap)(of->reserved + of->length - BLOCK, (size_t)BLOCK, 0ul, of->handle, 0ul) == 801);
        EXPECT(FN(cuMemUnmap)(of->at, of->bytes / 2) == 1 && FN(cuMemSetAccess)(of->at, of->bytes / 2, READ_WRITE, 1ul) == 1);
        EXPECT(FN(cuMemAddressFree)(of->reserved, of->length) == 1);
        EXPECT(FN(cuMemRelease)(of->handle + 1000) == 1 && FN(cuMemMap)(of->at, of->bytes, 0ul, of->handle + 1000, 0ul) == 1);
        times++;
        usleep(1000);
    }
    return argument;
}

/* One handle of a size that no piece has, mapped as a whole. */
static void pool(void) {
    size_t bytes = (getenv("ALL_WORDS") ? 90 : 402) * MIB;
    properties_of_pool = getenv("EXPORTABLE") ? SHARED : ON_CARD;
    struct asked of = {create(bytes, properties_of_pool), range(bytes + 8 * MIB) + 4 * MIB, bytes};
    of.reserved = of.at - 4 * MIB, of.length = bytes + 8 * MIB;
    map(of.at, bytes, of.handle);
    fill(of.at, bytes, 7);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, asks, &of));
    uint32_t rounds = 0;
    do {
        run(of.at, bytes);
        if (++rounds % 8 == 0) check(of.at, bytes, 7 + rounds);
    } while (goes_on());
    over = 1;
    CHECK(pthread_join(thread, NULL));
    check(of.at, bytes, 7 + rounds);
    CHECK(FN(cuMemUnmap)(of.at, bytes));
    CHECK(FN(cuMemRelease)(of.handle));
    CHECK(FN(cuMemAddressFree)(of.reserved, of.length));
}

/* Segments side by side in a reserved range, with access given to several in one call: they come, go, and move to other addresses. */
#define SEGMENT (20 * MIB)
#define SEGMENTS 16
#define PLACES 32
struct segment { uint64_t handle; int place; uint32_t value; };
static uint64_t expandable;
static int taken[PLACES];
static unsigned seed = 1;
static void settle(struct segment *s) {
    int place = rand_r(&seed) % PLACES;
    while (taken[place]) place = (place + 1) % PLACES;
    CHECK(FN(cuMemMap)(expandable + place * SEGMENT, SEGMENT, 0ul, s->handle, 0ul));
    taken[place] = 1;
    s->place = place;
    int first = place, last = place;
    while (first > 0 && taken[first - 1]) first--;
    while (last + 1 < PLACES && taken[last + 1]) last++;
    CHECK(FN(cuMemSetAccess)(expandable + first * SEGMENT, (last + 1 - first) * SEGMENT, READ_WRITE, 1ul));
}
static void unsettle(struct segment *s) {
    CHECK(FN(cuMemUnmap)(expandable + s->place * SEGMENT, SEGMENT));
    taken[s->place] = 0;
}
/* Another thread maps and unmaps without work, so also while its process waits for its turn. */
static void *maps_without_work(void *argument) {
    uint64_t at = range(64 * MIB);
    unsigned seed = 9;
    long times = 0;
    CHECK(FN(cuCtxSetCurrent)(context));
    while (!over) {
        size_t bytes = (1 + rand_r(&seed) % 4) * 8 * MIB;
        uint64_t handle = create(bytes, rand_r(&seed) % 2 ? ON_CARD : SHARED);
        map(at, bytes, handle);
        if (rand_r(&seed) % 4 == 0) {
            fill(at, bytes, handle);
            check(at, bytes, handle);
        }
        /* The memory lives while it is mapped. */
        CHECK(FN(cuMemRelease)(handle));
        usleep(rand_r(&seed) % 3000);
        CHECK(FN(cuMemUnmap)(at, bytes));
        times++;
    }
    EXPECT(times > 10);
    return argument;
}
static void segments(void) {
    struct segment all[SEGMENTS] = {0};
    pthread_t thread;
    expandable = range(PLACES * SEGMENT);
    CHECK(pthread_create(&thread, NULL, maps_without_work, NULL));
    do {
        struct segment *s = &all[rand_r(&seed) % SEGMENTS];
        if (!s->handle) {
            s->handle = create(SEGMENT, rand_r(&seed) % 2 ? ON_CARD : SHARED);
            settle(s);
            fill(expandable + s->place * SEGMENT, SEGMENT, s->value = rand_r(&seed));
        } else if (rand_r(&seed) % 3) {
            unsettle(s);
            settle(s);
        } else {
            unsettle(s);
            CHECK(FN(cuMemRelease)(s->handle));
            s->handle = 0;
        }
        for (int i = 0; i < SEGMENTS; i++)
            if (all[i].handle) {
                run(expandable + all[i].place * SEGMENT, SEGMENT);
                all[i].value++;
            }
        CHECK(FN(cuCtxSynchronize)());
        s = &all[rand_r(&seed) % SEGMENTS];
        if (s->handle) check(expandable + s->place * SEGMENT, SEGMENT, s->value);
    } while (goes_on());
    over = 1;
    CHECK(pthread_join(thread, NULL));
    for (int i = 0; i < SEGMENTS; i++)
        if (all[i].handle) check(expandable + all[i].place * SEGMENT, SEGMENT, all[i].value);
}

/* One memory at two addresses, one that is mapped nowhere for a while, and one without a handle. */
static void aliases(void) {
    size_t bytes = 130 * MIB;
    uint64_t places = range(8 * bytes), twice = create(bytes, ON_CARD), kept = create(bytes, FOR_RDMA), loose = create(bytes, SHARED), again;
    int other = 1, away = 0;
    int properties[8];
    CHECK(FN(cuMemGetAllocationPropertiesFromHandle)(properties, kept));
    EXPECT(!memcmp(properties, FOR_RDMA, sizeof properties));
    map(places, bytes, twice);
    map(places + bytes, bytes, twice);
    map(places + 4 * bytes, bytes, kept);
    map(places + 5 * bytes, bytes, loose);
    CHECK(FN(cuMemRelease)(loose));
    fill(places, bytes, 1);
    fill(places + 4 * bytes, bytes, 2);
    fill(places + 5 * bytes, bytes, 3);
    uint32_t rounds = 0, of_kept = 0;
    do {
        run(places, bytes);
        run(places + other * bytes, bytes);
        run(places + 5 * bytes, bytes);
        if (!away) run(places + 4 * bytes, bytes), of_kept++;
        rounds++;
        if (rounds % 5 == 0) {
            CHECK(FN(cuCtxSynchronize)());
            check(places, bytes, 1 + 2 * rounds);
            check(places + other * bytes, bytes, 1 + 2 * rounds);
            CHECK(FN(cuMemUnmap)(places + other * bytes, bytes));
            other = other % 3 + 1;
            map(places + other * bytes, bytes, twice);
            if (away) map(places + 4 * bytes, bytes, kept);
            else CHECK(FN(cuMemUnmap)(places + 4 * bytes, bytes));
            away = !away;
            /* Its handle comes from its address. */
            CHECK(FN(cuMemRetainAllocationHandle)(&again, places + 5 * bytes));
            map(places + 6 * bytes, bytes, again);
            CHECK(FN(cuMemRelease)(again));
            check(places + 6 * bytes, bytes, 3 + rounds);
            CHECK(FN(cuMemUnmap)(places + 6 * bytes, bytes));
        }
    } while (goes_on());
    if (away) map(places + 4 * bytes, bytes, kept);
    check(places, bytes, 1 + 2 * rounds);
    check(places + other * bytes, bytes, 1 + 2 * rounds);
    check(places + 4 * bytes, bytes, 2 + of_kept);
    check(places + 5 * bytes, bytes, 3 + rounds);
}

/* Memory outlives the contexts that used it, also while it is away. */
static void contexts(void) {
    size_t bytes = 300 * MIB;
    uint64_t at = range(bytes), handle = create(bytes, ON_CARD);
    uint32_t rounds = 0;
    void *now;
    map(at, bytes, handle);
    fill(at, bytes, 5);
    CHECK(FN(cuCtxCreate_v2)(&now, 0, 0));
    CHECK(FN(cuDevicePrimaryCtxRelease_v2)(0));
    do {
        void *next;
        load_kernel();
        for (int i = 0; i < 10; i++) run(at, bytes), rounds++;
        CHECK(FN(cuCtxSynchronize)());
        /* It is this process's turn, or not. */
        usleep(rand_r(&seed) % 2000000);
        CHECK(FN(cuCtxCreate_v2)(&next, 0, 0));
        CHECK(FN(cuCtxDestroy_v2)(now));
        now = next;
        check(at, bytes, 5 + rounds);
    } while (goes_on());
}

/* The context in which memory moves ends between two calls of its restore: while it is made accessible, which the driver holds
   up for as long as a file is there. */
static void *goes_on_soon(void *held) {
    sleep(1);
    CHECK(unlink(held));
    return NULL;
}
static void *ends_meanwhile(void *held) {
    char waits[4096];
    pthread_t thread;
    snprintf(waits, sizeof waits, "%s.waits", (char *)held);
    while (access(waits, F_OK)) usleep(100);
    CHECK(pthread_create(&thread, NULL, goes_on_soon, held));
    CHECK(FN(cuDevicePrimaryCtxRelease_v2)(0));
    CHECK(pthread_join(thread, NULL));
    over = 1;
    return NULL;
}
static void restored(void) {
    size_t bytes = 300 * MIB;
    uint32_t rounds = 0;
    void *other;
    char *held = held_file();
    pthread_t thread;
    uint64_t at = range(bytes), handle = create(bytes, ON_CARD);
    map(at, bytes, handle);
    fill(at, bytes, 5);
    CHECK(FN(cuCtxSynchronize)());
    CHECK(FN(cuCtxCreate_v2)(&other, 0, 0));
    load_kernel();
    fclose(fopen(held, "w"));
    CHECK(pthread_create(&thread, NULL, ends_meanwhile, held));
    do {
        run(at, bytes);
        /* Queued work has to drain within the patience for it. */
        if (++rounds % 8 == 0) CHECK(FN(cuStreamSynchronize)(NULL));
    } while (!over || goes_on());
    CHECK(pthread_join(thread, NULL));
    check(at, bytes, 5 + rounds);
}

/* From the moment that others can get memory it stays on the card; other memory does not. */
static void shares(void) {
    size_t bytes = 100 * MIB;
    uint64_t at = range(3 * bytes), shared = create(bytes, SHARED), other = create(bytes, SHARED), plain = create(bytes, ON_CARD);
    int descriptor = -1;
    map(at, bytes, shared);
    map(at + bytes, bytes, other);
    map(at + 2 * bytes, bytes, plain);
    fill(at, 3 * bytes, 5);
    EXPECT(FN(cuMemExportToShareableHandle)(&descriptor, plain, 1, 0ul) == 1);
    CHECK(FN(cuMemExportToShareableHandle)(&descriptor, shared, 1, 0ul));
    EXPECT(descriptor >= 0);
    puts("shared");
    fflush(stdout);
    uint32_t rounds = 0;
    do {
        run(at, 3 * bytes);
        if (++rounds % 8 == 0) CHECK(FN(cuStreamSynchronize)(NULL));
    } while (goes_on());
    check(at, 3 * bytes, 5 + rounds);
    /* What is pinned counts until it ends. */
    CHECK(FN(cuMemUnmap)(at, 3 * bytes));
    CHECK(FN(cuMemRelease)(shared));
    CHECK(FN(cuMemRelease)(other));
    CHECK(FN(cuMemRelease)(plain));
}

int main(int argc, char **argv) {
    start();
    load_kernel();
    if (!strcmp(argv[1], "pool")) pool();
    else if (!strcmp(argv[1], "segments")) segments();
    else if (!strcmp(argv[1], "aliases")) aliases();
    else if (!strcmp(argv[1], "contexts")) contexts();
    else if (!strcmp(argv[1], "restored")) restored();
    else if (!strcmp(argv[1], "shares")) shares();
    else return 2;
    return 0;
}
