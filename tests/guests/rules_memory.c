/* Memory: fills and copies of every kind, memory in stream order, words that streams wait for, green contexts, peers, the host. */
#include "rules.h"
#include <sys/wait.h>

static uint64_t memory_;
static void *stream_;
static void begin(void) {
    start();
    load_kernel();
    memory_ = alloc(8 * MIB);
    CHECK(FN(cuMemsetD32_v2)(memory_, 0, 2 * MIB));
    CHECK(launch(memory_, 0, 1, NULL));
    CHECK(FN(cuCtxSynchronize)());
    stream_ = new_stream(NON_BLOCKING);
}
static uint64_t managed(size_t bytes) {
    uint64_t base;
    CHECK(FN(cuMemAllocManaged)(&base, bytes, 1));
    return base;
}
static int query(void *stream) { return FN(cuStreamQuery)(stream); }

static void fills(void) {
    unsigned char got[64], want[64];
    begin();
    for (int async = 0; async < 2; async++) {
        memset(want, 0, sizeof want);
        CHECK(FN(cuMemsetD8_v2)(memory_, 0, sizeof want));
        CHECK(FN(cuCtxSynchronize)());
        CHECK(async ? FN(cuMemsetD8Async)(memory_ + 3, 0x11, 5ul, stream_) : FN(cuMemsetD8_v2)(memory_ + 3, 0x11, 5ul));
        memset(want + 3, 0x11, 5);
        CHECK(async ? FN(cuMemsetD16Async)(memory_ + 10, 0x2233, 3ul, stream_) : FN(cuMemsetD16_v2)(memory_ + 10, 0x2233, 3ul));
        for (int i = 0; i < 3; i++) memcpy(want + 10 + 2 * i, &(short){0x2233}, 2);
        CHECK(async ? FN(cuMemsetD32Async)(memory_ + 20, 0x44556677, 2ul, stream_) : FN(cuMemsetD32_v2)(memory_ + 20, 0x44556677, 2ul));
        for (int i = 0; i < 2; i++) memcpy(want + 20 + 4 * i, &(int){0x44556677}, 4);
        /* Three rows, eight bytes apart. */
        CHECK(async ? FN(cuMemsetD2D16Async)(memory_ + 32, 8ul, 0x1234, 2ul, 3ul, stream_) : FN(cuMemsetD2D16_v2)(memory_ + 32, 8ul, 0x1234, 2ul, 3ul));
        for (int i = 0; i < 3; i++) for (int j = 0; j < 2; j++) memcpy(want + 32 + 8 * i + 2 * j, &(short){0x1234}, 2);
        CHECK(FN(cuStreamSynchronize)(stream_));
        CHECK(FN(cuMemcpyDtoH_v2)(got, memory_, sizeof got));
        EXPECT(!memcmp(got, want, sizeof got));
    }
    /* Addresses that are not aligned, or beyond the end. */
    EXPECT(FN(cuMemsetD16_v2)(memory_ + 1, 1, 1ul) == 1);
    EXPECT(FN(cuMemsetD32_v2)(memory_ + 2, 1, 1ul) == 1);
    EXPECT(FN(cuMemsetD8_v2)(memory_, 1, 8 * MIB + 1) == 1);
    EXPECT(FN(cuMemsetD2D8_v2)(memory_, 4ul, 1, 8ul, 2ul) == 1);
}

/* A fill and a copy on the card return at once, unless the memory is managed. */
static volatile int returned;
static void *fills_managed(void *base) {
    CHECK(FN(cuCtxSetCurrent)(context));
    CHECK(FN(cuMemsetD32_v2)(base, 1, 4ul));
    returned = 1;
    return base;
}
static void calls_that_return_before_they_are_done(void) {
    pthread_t thread;
    begin();
    uint64_t seen = managed(MIB);
    hold(LEGACY);
    CHECK(FN(cuMemsetD32_v2)(memory_, 1, 4ul));
    CHECK(FN(cuMemcpyDtoD_v2)(memory_ + MIB, memory_, 16ul));
    CHECK(FN(cuMemcpy)(memory_ + MIB, memory_, 16ul));
    EXPECT(query(LEGACY) == NOT_READY);
    CHECK(pthread_create(&thread, NULL, fills_managed, (void *)seen));
    a_while();
    EXPECT(!returned);
    release();
    CHECK(pthread_join(thread, NULL));
    uint32_t word;
    CHECK(FN(cuMemcpyDtoH_v2)(&word, memory_ + MIB, 4ul));
    EXPECT(word == 1);
}

struct copy { size_t x, y; unsigned kind; void *host; uint64_t device; void *array; size_t pitch; };
static void copies(void) {
    uint32_t from[64], to[64];
    begin();
    for (int i = 0; i < 64; i++) from[i] = i;
    CHECK(FN(cuMemcpyHtoDAsync_v2)(memory_, from, sizeof from, stream_));
    CHECK(FN(cuMemcpyDtoDAsync_v2)(memory_ + 4 * MIB, memory_, sizeof from, stream_));
    CHECK(FN(cuMemcpyDtoHAsync_v2)(to, memory_ + 4 * MIB, sizeof to, stream_));
    CHECK(FN(cuStreamSynchronize)(stream_));
    EXPECT(!memcmp(from, to, sizeof to));
    /* The driver finds out the kinds of the two ends. */
    CHECK(FN(cuMemcpy)(memory_ + 2 * MIB, (uint64_t)(from + 8), 64ul));
    CHECK(FN(cuMemcpyAsync)((uint64_t)to, memory_ + 2 * MIB, 64ul, stream_));
    CHECK(FN(cuStreamSynchronize)(stream_));
    EXPECT(to[0] == 8 && to[15] == 23);
    /* Over the edge of two blocks. */
    CHECK(FN(cuMemcpyHtoD_v2)(memory_ + 2 * MIB - 100, from, sizeof from));
    memset(to, 0, sizeof to);
    CHECK(FN(cuMemcpyDtoH_v2)(to, memory_ + 2 * MIB - 100, sizeof to));
    EXPECT(!memcmp(from, to, sizeof to));
    /* Four rows of twelve bytes. */
    struct { struct copy from, to; size_t width, height; } plane = {{4, 1, 1, from, 0, NULL, 32}, {0, 0, 2, NULL, memory_ + 4 * MIB, NULL, 16}, 12, 4};
    CHECK(FN(cuMemcpy2D_v2)(&plane));
    CHECK(FN(cuMemcpyDtoH_v2)(to, memory_ + 4 * MIB, sizeof to));
    for (int row = 0; row < 4; row++) for (int i = 0; i < 3; i++) EXPECT(to[row * 4 + i] == (row + 1) * 8 + 1 + i);
    memset(to, 0, sizeof to);
    struct { struct copy from, to; size_t width, height; } back = {plane.to, {0, 0, 1, to, 0, NULL, 64}, 12, 4};
    CHECK(FN(cuMemcpy2DAsync_v2)(&back, stream_));
    CHECK(FN(cuStreamSynchronize)(stream_));
    EXPECT(to[16] == 17 && to[18] == 19 && to[3] == 0);
    EXPECT(FN(cuMemcpyHtoD_v2)(memory_ + 8 * MIB - 4, from, 8ul) == 1);
}

static void memory_in_stream_order(void) {
    uint64_t a, b;
    begin();
    size_t before = free_bytes();
    /* Freed memory stays until the stream comes so far. */
    CHECK(FN(cuMemAllocAsync)(&a, 4 * MIB, stream_));
    hold(stream_);
    CHECK(launch(a, 4, 1, stream_));
    CHECK(FN(cuMemFreeAsync)(a, stream_));
    EXPECT(FN(cuMemFreeAsync)(a, stream_) == 1 && FN(cuMemFree_v2)(a) == 1);
    EXPECT(free_bytes() == before - 4 * MIB);
    /* Work behind it on the stream can have the memory. */
    CHECK(FN(cuMemAllocAsync)(&b, 4 * MIB, stream_));
    EXPECT(b == a && free_bytes() == before - 4 * MIB);
    CHECK(launch(b, 4, 1, stream_));
    /* Work on other streams cannot. */
    uint64_t other;
    CHECK(FN(cuMemAllocAsync)(&other, 4 * MIB, new_stream(NON_BLOCKING)));
    EXPECT(other != a && free_bytes() == before - 8 * MIB);
    CHECK(FN(cuMemFreeAsync)(other, stream_));
    release();
    CHECK(FN(cuStreamSynchronize)(stream_));
    EXPECT(free_bytes() == before - 4 * MIB);
    CHECK(FN(cuMemFreeAsync)(b, stream_));
    CHECK(FN(cuStreamSynchronize)(stream_));
    EXPECT(free_bytes() == before);
    EXPECT(FN(cuMemFreeAsync)(managed(MIB), stream_) != 0);
}

static void words_that_streams_wait_for(void) {
    uint32_t *host, word = 7, got;
    begin();
    CHECK(FN(cuMemHostAlloc)(&host, 4096ul, 0));
    void *writer = new_stream(NON_BLOCKING);
    uint64_t words[] = {memory_, (uint64_t)host};
    for (int i = 0; i < 2; i++) {
        /* The conditions: at least, equal, and, nor. */
        for (int how = 0; how < 4; how++) {
            uint32_t wait_for = how == 3 ? ~8u : 8, before = how == 3 ? 8 : 0, then = how == 0 ? 9 : how == 3 ? 1 : 8;
            CHECK(FN(cuStreamWriteValue32_v2)(writer, words[i], before, 0));
            CHECK(FN(cuStreamSynchronize)(writer));
            CHECK(FN(cuStreamWaitValue32_v2)(stream_, words[i], wait_for, how));
            CHECK(launch(memory_ + 2 * MIB, 4, 1, stream_));
            a_while();
            EXPECT(query(stream_) == NOT_READY);
            CHECK(FN(cuStreamWriteValue32_v2)(writer, words[i], then, 0));
            CHECK(FN(cuStreamSynchronize)(stream_));
        }
        CHECK(FN(cuStreamWaitValue64_v2)(stream_, words[i], 1ul << 40, 1));
        CHECK(FN(cuStreamWriteValue64_v2)(writer, words[i], 1ul << 40, 0));
        CHECK(FN(cuStreamSynchronize)(stream_));
    }
    /* The host may write as well, and read. */
    EXPECT(*(uint64_t *)host == 1ul << 40);
    CHECK(FN(cuStreamWaitValue32_v2)(stream_, (uint64_t)host, 3, 1));
    *(volatile uint32_t *)host = 3;
    CHECK(FN(cuStreamSynchronize)(stream_));
    CHECK(FN(cuMemcpyDtoH_v2)(&got, memory_ + 2 * MIB, 4ul));
    EXPECT(got == 8);
    /* Managed memory, unaligned addresses and addresses without memory are refused. */
    EXPECT(FN(cuStreamWaitValue32_v2)(stream_, managed(4096), 0, 0) == 1);
    EXPECT(FN(cuStreamWriteValue32_v2)(stream_, managed(4096), 0, 0) == 1);
    EXPECT(FN(cuStreamWaitValue32_v2)(stream_, memory_ + 2, 0, 0) == 1);
    EXPECT(FN(cuStreamWaitValue32_v2)(stream_, (uint64_t)&word, 7, 1) == 1);
    CHECK(FN(cuMemFreeHost)(host));
}

static void page_locked_memory(void) {
    void *host, *device;
    static char page[8192] __attribute__((aligned(4096)));
    unsigned type;
    begin();
    CHECK(FN(cuMemHostRegister_v2)(page, 4096ul, 0));
    EXPECT(FN(cuMemHostRegister_v2)(page, 8192ul, 0) == 712);
    CHECK(FN(cuMemHostGetDevicePointer_v2)(&device, page + 8, 0));
    EXPECT(device == page + 8);
    CHECK(FN(cuPointerGetAttribute)(&type, 2, page + 8));
    EXPECT(type == 1);
    CHECK(FN(cuMemHostUnregister)(page));
    EXPECT(FN(cuMemHostUnregister)(page) == 713);
    EXPECT(FN(cuMemHostGetDevicePointer_v2)(&device, page, 0) == 1);
    CHECK(FN(cuMemAllocHost_v2)(&host, 4096ul));
    EXPECT(FN(cuMemHostUnregister)(host) == 713);
    CHECK(FN(cuMemFreeHost)(host));
    EXPECT(FN(cuMemFreeHost)(host) == 1);
}

/* Copies to page-locked memory and back. Whole blocks may be kept in less memory there; parts are kept exactly. */
static void copies_of_page_locked_memory(void) {
    uint32_t words[4], *host;
    begin();
    CHECK(FN(cuMemsetD32_v2)(memory_, 9, 2 * MIB));
    CHECK(FN(cuMemsetD32_v2)(memory_ + 4 * MIB + 8, 5, 1ul));
    /* A fill returns before it is done, and the stream does not wait for the legacy one. */
    CHECK(FN(cuCtxSynchronize)());
    void *room = mmap(NULL, 10 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    host = (void *)(((uintptr_t)room + 2 * MIB - 1) / (2 * MIB) * (2 * MIB));
    CHECK(FN(cuMemHostRegister_v2)(host, 8 * MIB, 1));
    CHECK(FN(cuMemcpyDtoHAsync_v2)(host, memory_, 8 * MIB, stream_));
    CHECK(FN(cuStreamSynchronize)(stream_));
    CHECK(FN(cuMemsetD32_v2)(memory_, 77, 2 * MIB));
    CHECK(FN(cuCtxSynchronize)());
    CHECK(FN(cuMemcpyHtoDAsync_v2)(memory_, host, 8 * MIB, stream_));
    CHECK(FN(cuStreamSynchronize)(stream_));
    CHECK(FN(cuMemcpyDtoH_v2)(words, memory_ + 4 * MIB, sizeof words));
    EXPECT(words[0] == 9 && words[1] == 9 && words[2] == 5 && words[3] == 9);
    CHECK(FN(cuMemcpyDtoH_v2)(words, memory_ + 6 * MIB - 16, sizeof words));
    EXPECT(words[0] == 9 && words[3] == 9);
    CHECK(FN(cuMemcpyDtoHAsync_v2)(host + 1, memory_ + 4 * MIB, 12ul, stream_));
    CHECK(FN(cuStreamSynchronize)(stream_));
    EXPECT(host[1] == 9 && host[3] == 5);
    CHECK(FN(cuMemHostUnregister)(host));
    /* One copy does not span two ranges that were page-locked one by one. */
    char *halves = (char *)host;
    for (int i = 0; i < 2; i++) CHECK(FN(cuMemHostRegister_v2)(halves + i * 4 * MIB, 4 * MIB, 1));
    EXPECT(FN(cuMemcpyDtoHAsync_v2)(halves + 2 * MIB, memory_, 4 * MIB, stream_) == 1);
    EXPECT(FN(cuMemcpyHtoDAsync_v2)(memory_, halves + 2 * MIB, 4 * MIB, stream_) == 1);
    CHECK(FN(cuMemcpyHtoDAsync_v2)(memory_, halves + 4 * MIB, 4 * MIB, stream_));
    CHECK(FN(cuStreamSynchronize)(stream_));
    for (int i = 0; i < 2; i++) CHECK(FN(cuMemHostUnregister)(halves + i * 4 * MIB));
}

/* The host's touches of managed memory bring it to the host, a kernel's to the card. */
static void managed_memory_and_the_host(void) {
    uint32_t words[4] = {1, 2, 3, 4}, got[4];
    begin();
    uint64_t base = managed(4 * MIB);
    size_t before = free_bytes();
    CHECK(FN(nvsimHostWrite)(base + 2 * MIB, words, sizeof words));
    EXPECT(free_bytes() == before);
    CHECK(launch(base + 2 * MIB, 4, 1, stream_));
    CHECK(FN(cuStreamSynchronize)(stream_));
    EXPECT(free_bytes() == before - 2 * MIB);
    CHECK(FN(nvsimHostRead)(got, base + 2 * MIB, sizeof got));
    for (int i = 0; i < 4; i++) EXPECT(got[i] == words[i] + 1);
    EXPECT(free_bytes() == before);
    CHECK(FN(nvsimHostRead)(got, base, sizeof got));
    EXPECT(got[0] == 0);
    EXPECT(FN(nvsimHostRead)(got, memory_, sizeof got) == 1);
}

static void green_contexts(void) {
    char all[144], groups[2][144], rest[144];
    unsigned count = 2;
    void *description, *green, *derived, *stream, *of, *event, *other_event;
    begin();
    CHECK(FN(cuDeviceGetDevResource)(0, all, 1));
    CHECK(FN(cuDevSmResourceSplitByCount)(groups, &count, all, rest, 0, 8));
    EXPECT(count == 2 && *(unsigned *)(groups[1] + 96) == 8 && *(unsigned *)(rest + 96) == *(unsigned *)(all + 96) - 16);
    CHECK(FN(cuDevResourceGenerateDesc)(&description, groups, 1));
    CHECK(FN(cuGreenCtxCreate)(&green, description, 0, 1));
    CHECK(FN(cuCtxFromGreenCtx)(&derived, green));
    EXPECT(FN(cuGreenCtxStreamCreate)(&stream, green, BLOCKING, 0) == 1);
    CHECK(FN(cuGreenCtxStreamCreate)(&stream, green, NON_BLOCKING, 0));
    CHECK(FN(cuStreamGetCtx)(stream, &of));
    EXPECT(of == derived);
    event = new_event(), other_event = new_event();
    /* The green context's work is the primary context's too, but not the other way round. */
    hold(stream);
    CHECK(FN(cuCtxRecordEvent)(context, event));
    CHECK(FN(cuGreenCtxRecordEvent)(green, other_event));
    EXPECT(FN(cuEventQuery)(event) == NOT_READY && FN(cuEventQuery)(other_event) == NOT_READY);
    release();
    CHECK(FN(cuEventSynchronize)(event));
    CHECK(FN(cuEventSynchronize)(other_event));
    hold(stream_);
    CHECK(FN(cuGreenCtxRecordEvent)(green, other_event));
    CHECK(FN(cuCtxRecordEvent)(context, event));
    EXPECT(FN(cuEventQuery)(event) == NOT_READY && FN(cuEventQuery)(other_event) == OK);
    release();
    /* Kernels of the primary context run in it, and looks at that context break its captures. */
    CHECK(launch(memory_, 4, 1, stream));
    CHECK(FN(cuCtxPushCurrent_v2)(derived));
    CHECK(launch(memory_, 4, 1, NULL));
    CHECK(FN(cuCtxSynchronize)());
    CHECK(FN(cuCtxPopCurrent_v2)(NULL));
    void *graph;
    CHECK(FN(cuStreamBeginCapture_v2)(stream, 2));
    EXPECT(FN(cuCtxRecordEvent)(context, event) == 900);
    EXPECT(FN(cuStreamEndCapture)(stream, &graph) == 901);
    EXPECT(FN(cuCtxDestroy_v2)(derived) == 201);
    CHECK(FN(cuGreenCtxDestroy)(green));
    uint32_t word;
    CHECK(FN(cuMemcpyDtoH_v2)(&word, memory_, 4ul));
    EXPECT(word == 2);
}

/* Calls on one card that name the memory `there` of the other: copies to the host, from there, between the cards, and within the other; a fill. */
static void answers_across(void *other, uint64_t here, uint64_t there, int copies, int fill) {
    uint32_t words[4] = {1, 2, 3, 4}, got[4] = {0};
    EXPECT(FN(cuMemcpyHtoD_v2)(there, words, sizeof words) == copies);
    EXPECT(FN(cuMemcpyDtoH_v2)(got, there, sizeof got) == copies);
    EXPECT(copies || !memcmp(got, words, sizeof got));
    EXPECT(FN(cuMemcpyHtoDAsync_v2)(there, words, sizeof words, stream_) == copies);
    EXPECT(FN(cuMemcpyDtoHAsync_v2)(got, there, sizeof got, stream_) == copies);
    EXPECT(FN(cuMemcpyDtoD_v2)(here, there, sizeof words) == copies);
    EXPECT(FN(cuMemcpy)(there, here, sizeof words) == copies);
    EXPECT(FN(cuMemcpyDtoDAsync_v2)(there + 64, there, sizeof words, stream_) == copies);
    EXPECT(FN(cuMemcpyAsync)(here + 64, there, sizeof words, stream_) == copies);
    EXPECT(FN(cuMemsetD32Async)(there, 7, 4, stream_) == fill);
    CHECK(FN(cuMemcpyPeer)(here, context, there, other, sizeof words));
    CHECK(FN(cuMemcpyPeerAsync)(there + 128, other, here, context, sizeof words, stream_));
    CHECK(FN(cuStreamSynchronize)(stream_));
}

/* Measured on two H200s: plain memory is copied without access, and mapped memory by cuMemcpyPeer alone. */
static void copies_between_cards(void) {
    void *other, *handle;
    uint64_t mapped;
    begin();
    CHECK(FN(cuDevicePrimaryCtxRetain)(&other, 1));
    CHECK(FN(cuCtxPushCurrent_v2)(other));
    uint64_t plain = alloc(2 * MIB);
    int properties[8] = {1, 0, 1, 1}, access[2][3] = {{1, 1, 3}, {1, 0, 3}};
    CHECK(FN(cuMemCreate)(&handle, 2 * MIB, properties, 0ul));
    CHECK(FN(cuMemAddressReserve)(&mapped, 2 * MIB, 0ul, 0ul, 0ul));
    CHECK(FN(cuMemMap)(mapped, 2 * MIB, 0ul, handle, 0ul));
    CHECK(FN(cuMemSetAccess)(mapped, 2 * MIB, access, 1ul));
    CHECK(FN(cuCtxPopCurrent_v2)(NULL));
    answers_across(other, memory_, plain, OK, 1);
    answers_across(other, memory_, mapped, 1, 1);
    CHECK(FN(cuCtxEnablePeerAccess)(other, 0));
    answers_across(other, memory_, plain, OK, OK);
    answers_across(other, memory_, mapped, 1, 1);
    CHECK(FN(cuMemSetAccess)(mapped, 2 * MIB, access[1], 1ul));
    answers_across(other, memory_, mapped, OK, OK);
    CHECK(FN(cuCtxDisablePeerAccess)(other));
    int value = -1;
    for (int attribute = 1; attribute < 5; attribute++) {
        CHECK(FN(cuDeviceGetP2PAttribute)(&value, attribute, 0, 1));
        EXPECT(value == (attribute > 1));
    }
    EXPECT(FN(cuDeviceGetP2PAttribute)(&value, 2, 1, 1) == 101 && FN(cuDeviceGetP2PAttribute)(&value, 2, 0, 2) == 101);
}

/* Two cards. */
static void peers(void) {
    int can = 9;
    uint32_t words[4] = {1, 2, 3, 4}, got[4];
    begin();
    void *other = NULL;
    CHECK(FN(cuDeviceCanAccessPeer)(&can, 0, 1)); EXPECT(can == 1);
    CHECK(FN(cuDeviceCanAccessPeer)(&can, 0, 0)); EXPECT(can == 0);
    CHECK(FN(cuDevicePrimaryCtxRetain)(&other, 1));
    EXPECT(FN(cuCtxDisablePeerAccess)(other) == 705);
    CHECK(FN(cuCtxEnablePeerAccess)(other, 0));
    EXPECT(FN(cuCtxEnablePeerAccess)(other, 0) == 704);
    CHECK(FN(cuCtxPushCurrent_v2)(other));
    uint64_t there = alloc(2 * MIB);
    void *of_other = new_stream(NON_BLOCKING), *event = new_event();
    CHECK(FN(cuCtxPopCurrent_v2)(NULL));
    CHECK(FN(cuMemcpyHtoD_v2)(memory_, words, sizeof words));
    CHECK(FN(cuMemcpyPeer)(there, other, memory_, context, sizeof words));
    CHECK(launch(memory_, 4, 1, stream_));
    CHECK(FN(cuMemcpyPeerAsync)(there + 16, other, memory_, context, sizeof words, stream_));
    CHECK(FN(cuStreamSynchronize)(stream_));
    CHECK(FN(cuMemcpyDtoH_v2)(got, there + 8, sizeof got));
    EXPECT(got[0] == 3 && got[1] == 4 && got[2] == 2 && got[3] == 3);
    /* A stream waits for an event of the other card. */
    hold(of_other);
    CHECK(FN(cuCtxPushCurrent_v2)(other));
    CHECK(FN(cuEventRecord)(event, of_other));
    CHECK(FN(cuCtxPopCurrent_v2)(NULL));
    CHECK(FN(cuStreamWaitEvent)(stream_, event, 0));
    EXPECT(query(stream_) == NOT_READY);
    release();
    CHECK(FN(cuStreamSynchronize)(stream_));
    CHECK(FN(cuCtxDisablePeerAccess)(other));
}

/* A program's own pools, beside a card's default one. */
static void pools_of_the_program(void) {
    int plain[32] = {1, 0, 1, 0}, of_managed[32] = {2, 0, 1, 0};
    void *pool, *default_pool, *current;
    uint64_t a, b, all = ~0ul, reserved;
    unsigned is;
    begin();
    size_t before = free_bytes();
    CHECK(FN(cuDeviceGetDefaultMemPool)(&default_pool, 0));
    CHECK(FN(cuMemPoolCreate)(&pool, plain));
    EXPECT(pool != default_pool && FN(cuMemPoolDestroy)(default_pool) == 1);
    CHECK(FN(cuDeviceSetMemPool)(0, pool));
    CHECK(FN(cuDeviceGetMemPool)(&current, 0));
    EXPECT(current == pool);
    /* The pool keeps freed memory, for its own allocations. */
    CHECK(FN(cuMemPoolSetAttribute)(pool, 4, &all));
    CHECK(FN(cuMemAllocAsync)(&a, 4 * MIB, stream_));
    CHECK(FN(cuMemFreeAsync)(a, stream_));
    CHECK(FN(cuStreamSynchronize)(stream_));
    CHECK(FN(cuMemPoolGetAttribute)(pool, 5, &reserved));
    EXPECT(reserved == 4 * MIB && free_bytes() == before - 4 * MIB);
    CHECK(FN(cuMemAllocFromPoolAsync)(&b, 4 * MIB, default_pool, stream_));
    EXPECT(b != a && free_bytes() == before - 8 * MIB);
    CHECK(FN(cuMemAllocFromPoolAsync)(&a, 4 * MIB, pool, stream_));
    EXPECT(free_bytes() == before - 8 * MIB);
    /* Memory that the pool has handed out outlives it. */
    CHECK(FN(cuMemPoolDestroy)(pool));
    CHECK(FN(cuDeviceGetMemPool)(&current, 0));
    EXPECT(current == default_pool);
    CHECK(launch(a, 4, 1, stream_));
    CHECK(FN(cuMemFreeAsync)(a, stream_));
    CHECK(FN(cuMemFreeAsync)(b, stream_));
    CHECK(FN(cuStreamSynchronize)(stream_));
    EXPECT(free_bytes() == before);
    /* A managed pool never takes the place of the default pool. */
    CHECK(FN(cuMemPoolCreate)(&pool, of_managed));
    CHECK(FN(cuDeviceSetMemPool)(0, pool));
    CHECK(FN(cuMemAllocAsync)(&a, 4 * MIB, stream_));
    CHECK(FN(cuPointerGetAttribute)(&is, 8, a));
    EXPECT(!is);
    CHECK(FN(cuMemAllocFromPoolAsync)(&b, 4 * MIB, pool, stream_));
    CHECK(FN(cuPointerGetAttribute)(&is, 8, b));
    EXPECT(is == 1);
}

/* A pool keeps what was freed to it until somebody synchronizes with that stream, an event on it or the context, or ends the
   stream. Queries do not count, and trimming gives nothing back before. Meanwhile it serves no other pool, and no other call. */
static void pools_keep_what_nobody_has_synchronized_with(void) {
    void *pool;
    begin();
    void *other = new_stream(NON_BLOCKING), *event = new_event(), *ended = new_stream(NON_BLOCKING), *stream_ = new_stream(NON_BLOCKING);
    size_t before = free_bytes();
    CHECK(FN(cuDeviceGetDefaultMemPool)(&pool, 0));
    for (int way = 0; way < 4; way++) {
        uint64_t memory, more;
        if (way == 3) stream_ = ended;
        CHECK(FN(cuMemAllocAsync)(&memory, 4 * MIB, stream_));
        CHECK(FN(cuMemsetD32Async)(memory, 1, MIB, stream_));
        CHECK(FN(cuEventRecord)(event, stream_));
        CHECK(FN(cuMemFreeAsync)(memory, stream_));
        while (FN(cuStreamQuery)(stream_) == NOT_READY) usleep(200);
        CHECK(FN(cuEventSynchronize)(event));
        CHECK(FN(cuStreamSynchronize)(other));
        CHECK(FN(cuCtxRecordEvent)(context, event));
        CHECK(FN(cuEventSynchronize)(event));
        CHECK(FN(cuMemPoolTrimTo)(pool, 0ul));
        EXPECT(free_bytes() == before - 4 * MIB);
        EXPECT(FN(cuMemAlloc_v2)(&more, before) == 2);
        EXPECT(free_bytes() == before - 4 * MIB);
        switch (way) {
        case 0: CHECK(FN(cuStreamSynchronize)(stream_)); break;
        case 1: CHECK(FN(cuEventRecord)(event, stream_)); CHECK(FN(cuEventSynchronize)(event)); break;
        case 2: CHECK(FN(cuCtxSynchronize)()); break;
        case 3: CHECK(FN(cuStreamDestroy_v2)(ended)); break;
        }
        EXPECT(free_bytes() == before);
    }
}

/* Memory of a pool is the device's: it outlives the context of the stream for which it was handed out, and so does the pool. */
static void pools_outlive_contexts(void) {
    int plain[32] = {1, 0, 1, 0}, managed[32] = {2, 0, 1, 0}, *kinds[2] = {plain, managed};
    void *pool, *second, *current;
    uint32_t word;
    begin();
    CHECK(FN(cuCtxCreate_v2)(&second, 0, 0));
    for (int kind = 0; kind < 2; kind++) {
        uint64_t memory, more;
        CHECK(FN(cuMemPoolCreate)(&pool, kinds[kind]));
        if (kind == 0) CHECK(FN(cuDeviceSetMemPool)(0, pool));
        CHECK(FN(cuDevicePrimaryCtxRetain)(&context, 0));
        CHECK(FN(cuCtxSetCurrent)(context));
        void *stream = new_stream(NON_BLOCKING);
        CHECK(FN(cuMemAllocFromPoolAsync)(&memory, 4 * MIB, pool, stream));
        CHECK(FN(cuMemsetD32Async)(memory, 5 + kind, MIB, stream));
        CHECK(FN(cuStreamSynchronize)(stream));
        CHECK(FN(cuDevicePrimaryCtxReset_v2)(0));
        CHECK(FN(cuCtxSetCurrent)(second));
        CHECK(FN(cuMemcpyDtoH_v2)(&word, memory, 4));
        EXPECT(word == 5u + kind);
        CHECK(FN(cuDeviceGetMemPool)(&current, 0));
        EXPECT(kind == 1 || current == pool);
        stream = new_stream(NON_BLOCKING);
        CHECK(FN(cuMemAllocFromPoolAsync)(&more, 4 * MIB, pool, stream));
        CHECK(FN(cuMemFreeAsync)(more, stream));
        CHECK(FN(cuMemFree_v2)(memory));
        CHECK(FN(cuStreamSynchronize)(stream));
        CHECK(FN(cuMemPoolDestroy)(pool));
    }
}

/* Mapped memory is the memory of the handle. */
static const int ON_CARD[16] = {1, 0, 1, 0};
static const int READ_WRITE[3] = {1, 0, 3}, NO_ACCESS[3] = {1, 0, 0};
static uint64_t physical(size_t bytes) {
    uint64_t handle;
    CHECK(FN(cuMemCreate)(&handle, bytes, ON_CARD, 0ul));
    return handle;
}
static uint64_t range(size_t bytes) {
    uint64_t at;
    CHECK(FN(cuMemAddressReserve)(&at, bytes, 0ul, 0ul, 0ul));
    return at;
}
static void mapped_memory(void) {
    uint32_t got, words[2] = {5, 6}, both[2];
    size_t granularity;
    begin();
    size_t before = free_bytes();
    CHECK(FN(cuMemGetAllocationGranularity)(&granularity, ON_CARD, 0));
    EXPECT(granularity == 2 * MIB);
    uint64_t handle = physical(4 * MIB), at = range(12 * MIB);
    EXPECT(at % (2 * MIB) == 0 && FN(cuMemAddressReserve)(&at, 3 * MIB, 0ul, 0ul, 0ul) == 1);
    EXPECT(FN(cuMemCreate)(&handle, 3 * MIB, ON_CARD, 0ul) == 1);
    EXPECT(free_bytes() == before - 4 * MIB);
    /* A mapping is whole, within reserved addresses, and alone there. */
    EXPECT(FN(cuMemMap)(at, 2 * MIB, 0ul, handle, 0ul) == 801);
    EXPECT(FN(cuMemMap)(at, 2 * MIB, 2 * MIB, handle, 0ul) == 801);
    EXPECT(FN(cuMemMap)(at + 10 * MIB, 4 * MIB, 0ul, handle, 0ul) == 1);
    EXPECT(FN(cuMemMap)(at, 4 * MIB, 0ul, handle + 64, 0ul) == 1);
    CHECK(FN(cuMemMap)(at, 4 * MIB, 0ul, handle, 0ul));
    EXPECT(FN(cuMemMap)(at + 2 * MIB, 4 * MIB, 0ul, handle, 0ul) == 1);
    /* Access is given to whole mappings; without it, a copy is refused. */
    EXPECT(FN(cuMemcpyDtoH_v2)(&got, at, 4ul) == 1);
    EXPECT(FN(cuMemSetAccess)(at, 2 * MIB, READ_WRITE, 1ul) == 1);
    EXPECT(FN(cuMemSetAccess)(at, 8 * MIB, READ_WRITE, 1ul) == 1);
    CHECK(FN(cuMemSetAccess)(at, 4 * MIB, READ_WRITE, 1ul));
    /* Other processes reach memory of cuMemAlloc by a handle, and no mapped memory. */
    char shared[64];
    CHECK(FN(cuIpcGetMemHandle)(shared, memory_));
    EXPECT(FN(cuIpcGetMemHandle)(shared, at) == 1);
    uint64_t second = physical(8 * MIB);
    CHECK(FN(cuMemMap)(at + 4 * MIB, 8 * MIB, 0ul, second, 0ul));
    CHECK(FN(cuMemSetAccess)(at, 12 * MIB, READ_WRITE, 1ul));
    CHECK(FN(cuMemRelease)(handle));
    EXPECT(FN(cuMemRelease)(handle) == 1);
    /* Work goes over the edge of two mappings. */
    CHECK(FN(cuMemcpyHtoD_v2)(at + 4 * MIB - 4, words, 8ul));
    CHECK(launch(at, 3 * MIB, 1, NULL));
    CHECK(FN(cuMemcpyDtoH_v2)(both, at + 4 * MIB - 4, 8ul));
    EXPECT(both[0] == 6 && both[1] == 7);
    /* The driver's view of it: the range is that of the reserved addresses, and it is of no context. */
    uint64_t value;
    int names[] = {1, 11, 12, 14, 18, 19};
    uint64_t values[] = {0, at, 12 * MIB, 0, 8 * MIB, at + 4 * MIB};
    for (int i = 0; i < 6; i++) {
        CHECK(FN(cuPointerGetAttribute)(&value, names[i], at + 9 * MIB));
        EXPECT(value == values[i]);
    }
    /* It can be mapped twice; descriptors are made of memory that was created for that. */
    int properties[8] = {0}, descriptor;
    uint64_t other = range(8 * MIB);
    CHECK(FN(cuMemMap)(other, 8 * MIB, 0ul, second, 0ul));
    CHECK(FN(cuMemSetAccess)(other, 8 * MIB, READ_WRITE, 1ul));
    CHECK(FN(cuMemcpyDtoH_v2)(&got, other, 4ul));
    EXPECT(got == 7);
    CHECK(FN(cuMemGetAllocationPropertiesFromHandle)(properties, second));
    EXPECT(!memcmp(properties, (int[8]){1, 0, 1}, sizeof properties));
    EXPECT(FN(cuMemExportToShareableHandle)(&descriptor, second, 1, 0ul) == 1);
    CHECK(FN(cuMemUnmap)(other, 8 * MIB));
    /* No mapping is unmapped in part. */
    EXPECT(FN(cuMemUnmap)(at, 2 * MIB) == 1);
    EXPECT(FN(cuMemUnmap)(at, 8 * MIB) == 1);
    EXPECT(FN(cuMemAddressFree)(at, 12 * MIB) == 1);
    CHECK(FN(cuMemUnmap)(at + 4 * MIB, 8 * MIB));
    EXPECT(free_bytes() == before - 12 * MIB);
    EXPECT(FN(cuMemcpyDtoH_v2)(&got, at + 4 * MIB, 4ul) == 1);
    CHECK(FN(cuMemcpyDtoH_v2)(&got, at + 4 * MIB - 4, 4ul));
    /* The memory that was unmapped still has its contents. */
    CHECK(FN(cuMemMap)(at + 4 * MIB, 8 * MIB, 0ul, second, 0ul));
    CHECK(FN(cuMemSetAccess)(at + 4 * MIB, 8 * MIB, READ_WRITE, 1ul));
    CHECK(FN(cuMemcpyDtoH_v2)(&got, at + 4 * MIB, 4ul));
    EXPECT(got == 7);
    CHECK(FN(cuMemUnmap)(at, 12 * MIB));
    EXPECT(free_bytes() == before - 8 * MIB);
    CHECK(FN(cuMemRelease)(second));
    EXPECT(free_bytes() == before);
    CHECK(FN(cuMemAddressFree)(at, 12 * MIB));
}

/* Says the address that it reaches, which has no memory, or no access. */
static void reach(int lacks_access) {
    begin();
    uint64_t at = range(4 * MIB), handle = physical(2 * MIB);
    CHECK(FN(cuMemMap)(at, 2 * MIB, 0ul, handle, 0ul));
    CHECK(FN(cuMemSetAccess)(at, 2 * MIB, lacks_access ? NO_ACCESS : READ_WRITE, 1ul));
    fprintf(stderr, "%#lx ", (unsigned long)(lacks_access ? at : at + 2 * MIB));
    launch(at, MIB, 1, NULL);
    FN(cuCtxSynchronize)();
}

/* Work that reaches addresses without memory, or without access, stops the process; each case runs in a process of its own. */
static void unmapped_memory_stops(void) {
    for (int lacks_access = 0; lacks_access < 2; lacks_access++) {
        char line[256], expected[256];
        int status = in_process(reach, lacks_access, line, sizeof line);
        unsigned long where = strtoul(line, NULL, 16);
        const char *why = lacks_access ? "may not be accessed" : "is not mapped";
        snprintf(expected, sizeof expected, "%#lx nvsim: work reaches %#lx, which %s\n", where, where, why);
        EXPECT(WIFSIGNALED(status) && !strcmp(line, expected));
    }
}

/* Physical memory is shared by descriptors, if it was made for that; other memory by handles (tests/gpu/probes/ipc_probe.py). Of other
 * processes, shares_memory.c tells. */
static void shared_memory(void) {
    static const int shared_on_card[16] = {1, 1, 1, 0};
    char handle[64], inner[64];
    uint64_t exported, again;
    int descriptor, other;
    begin();
    uint64_t plain = physical(2 * MIB);
    CHECK(FN(cuMemCreate)(&exported, 4 * MIB, shared_on_card, 0ul));
    EXPECT(FN(cuMemExportToShareableHandle)(&descriptor, plain, 1, 0ul) == 1);
    CHECK(FN(cuMemExportToShareableHandle)(&descriptor, exported, 1, 0ul));
    CHECK(FN(cuMemExportToShareableHandle)(&other, exported, 1, 0ul));
    EXPECT(descriptor != other);
    /* In its own process it is the handle that is known, once more. */
    CHECK(FN(cuMemImportFromShareableHandle)(&again, (void *)(long)descriptor, 1));
    EXPECT(again == exported);
    CHECK(FN(cuMemRelease)(again));
    CHECK(FN(cuMemRelease)(exported));
    EXPECT(FN(cuMemRelease)(exported) == 1);
    /* A descriptor keeps memory alive that nothing else has. */
    size_t before, now, all;
    CHECK(close(descriptor) | close(other));
    CHECK(FN(cuMemGetInfo_v2)(&before, &all));
    CHECK(FN(cuMemCreate)(&exported, 4 * MIB, shared_on_card, 0ul));
    CHECK(FN(cuMemExportToShareableHandle)(&descriptor, exported, 1, 0ul));
    other = dup(descriptor);
    CHECK(FN(cuMemRelease)(exported));
    CHECK(close(descriptor));
    CHECK(FN(cuMemGetInfo_v2)(&now, &all));
    EXPECT(now == before - 4 * MIB);
    CHECK(FN(cuMemImportFromShareableHandle)(&again, (void *)(long)other, 1));
    CHECK(close(other));
    CHECK(FN(cuMemRelease)(again));
    CHECK(FN(cuMemGetInfo_v2)(&now, &all));
    EXPECT(now == before);
    EXPECT(FN(cuMemImportFromShareableHandle)(&again, (void *)0l, 1) == 1 && FN(cuMemImportFromShareableHandle)(&again, (void *)-1l, 1) == 1);
    CHECK(FN(cuIpcGetMemHandle)(handle, memory_));
    CHECK(FN(cuIpcGetMemHandle)(inner, memory_ + 100));
    EXPECT(!memcmp(handle, inner, 64));
    EXPECT(FN(cuIpcCloseMemHandle)(memory_) == 1);
    uint64_t pooled;
    CHECK(FN(cuMemAllocAsync)(&pooled, 2 * MIB, NULL));
    EXPECT(FN(cuIpcGetMemHandle)(handle, pooled) == 1);
    CHECK(FN(cuMemRelease)(plain));
}

RULES(RULE(fills), RULE(calls_that_return_before_they_are_done), RULE(copies), RULE(memory_in_stream_order), RULE(words_that_streams_wait_for), RULE(page_locked_memory), RULE(copies_of_page_locked_memory),
      RULE(managed_memory_and_the_host), RULE(green_contexts), RULE(copies_between_cards), RULE(peers), RULE(pools_of_the_program), RULE(pools_keep_what_nobody_has_synchronized_with), RULE(pools_outlive_contexts), RULE(mapped_memory), RULE(shared_memory),
      RULE(unmapped_memory_stops))
