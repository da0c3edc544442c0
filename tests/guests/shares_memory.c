/* Memory that processes share by handles (CUDA IPC). The argument names what is tried; the answers are those that a card's driver gives
 * (tests/gpu/probes/ipc_probe.py), natively and where the library maps the memory. */
#include "guest.h"
#include "waits.h"
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#define BYTES (36 * MIB)
#define SMALL 4096ul
struct handle { char bytes[64]; };
static int give(struct handle *handle, uint64_t at) { return FN(cuIpcGetMemHandle)(handle, at); }
static int take(uint64_t *at, struct handle handle, unsigned flags) {
    int (*call)(uint64_t *, struct handle, unsigned) = look_up("cuIpcOpenMemHandle_v2");
    return call(at, handle, flags);
}
static int same(struct handle a, struct handle b) { return !memcmp(&a, &b, sizeof a); }
static int works_by_us(void) { return getenv("LD_PRELOAD") != NULL; }

/* Other processes, each of which does what it is told. They begin before the driver does here. */
enum what { START, OPEN, CLOSE, ADD, LOOK, GIVE, FREE, ALLOC, RANGE, CLOSE_ALL, HOLD, LET_GO, OPEN_ASIDE, OPENED, COPY_ELSEWHERE, RUN_ELSEWHERE };
struct order { enum what what; struct handle handle; uint64_t at; size_t bytes; uint32_t flags; };
struct result { int result; uint64_t at; size_t bytes; uint32_t word; struct handle handle; };
static struct other { pid_t pid; int socket; } others[4];

/* Work of another card with memory that was opened on this one. */
static void *other_card(void) {
    void *other;
    CHECK(FN(cuDevicePrimaryCtxRetain)(&other, 1));
    CHECK(FN(cuCtxSetCurrent)(other));
    return other;
}
static void copy_elsewhere(uint64_t at, size_t bytes, uint32_t word) {
    void *stream;
    other_card();
    uint64_t there = alloc(bytes);
    CHECK(FN(cuStreamCreate)(&stream, 1));
    CHECK(FN(cuMemcpyDtoDAsync_v2)(there, at, bytes, stream));
    CHECK(FN(cuStreamSynchronize)(stream));
    holds_in_each_word(there, bytes, word);
    CHECK(FN(cuMemsetD32_v2)(there, word + 1, bytes / 4));
    CHECK(FN(cuCtxSynchronize)());
    CHECK(FN(cuMemcpyDtoD_v2)(at, there, bytes));
    CHECK(FN(cuCtxSynchronize)());
    holds_in_each_word(at, bytes, word + 1);
    CHECK(FN(cuCtxSetCurrent)(context));
}
static void run_elsewhere(uint64_t at, struct handle later, size_t bytes, uint32_t word) {
    uint64_t too;
    void *other = other_card();
    CHECK(FN(cuCtxEnablePeerAccess)(context, 0));
    CHECK(FN(cuCtxSetCurrent)(context));
    CHECK(take(&too, later, 1));
    CHECK(FN(cuCtxSetCurrent)(other));
    load_kernel();
    CHECK(launch(at, bytes / 4, 100, NULL));
    CHECK(launch(too, bytes / 4, 100, NULL));
    CHECK(FN(cuCtxSynchronize)());
    CHECK(FN(cuCtxSetCurrent)(context));
    holds_in_each_word(at, bytes, word + 1);
    holds_in_each_word(too, bytes, word + 1);
}

/* What else is asked about memory of another process says the same as its range, and it has no handle of its own (measured on an H200). */
static void agrees_with(uint64_t at, uint64_t begin, size_t bytes) {
    int which[3] = {1, 11, 12}, here[2] = {1, 0};
    uint64_t said[3], access = 7, handle;
    void *places[3] = {&said[0], &said[1], &said[2]};
    for (int i = 0; i < 3; i++) CHECK(FN(cuPointerGetAttribute)(&said[i], which[i], at));
    EXPECT(said[0] == (uint64_t)context && said[1] == begin && said[2] == bytes);
    memset(said, 0, sizeof said);
    CHECK(FN(cuPointerGetAttributes)(3, which, places, at));
    EXPECT(said[0] == (uint64_t)context && said[1] == begin && said[2] == bytes);
    CHECK(FN(cuMemGetAccess)(&access, here, at));
    EXPECT(access == 0);
    EXPECT(FN(cuMemRetainAllocationHandle)(&handle, at) == 1);
}

/* An opening on another thread. */
static struct order aside;
static struct result from_aside;
static pthread_t opener;
static void *open_aside(void *data) {
    CHECK(FN(cuCtxSetCurrent)(context));
    from_aside.result = take(&from_aside.at, aside.handle, aside.flags);
    return data;
}

static struct result obey(struct order *o) {
    struct result r = {0};
    r.at = o->at;
    switch (o->what) {
    case START: start(); load_kernel(); break;
    case OPEN: r.at = 0; r.result = take(&r.at, o->handle, o->flags); break;
    case OPEN_ASIDE: aside = *o; EXPECT(!pthread_create(&opener, NULL, open_aside, NULL)); break;
    case OPENED: EXPECT(!pthread_join(opener, NULL)); r = from_aside; break;
    case CLOSE: r.result = FN(cuIpcCloseMemHandle)(o->at); break;
    case ADD: r.result = launch(o->at, o->bytes / 4, 100, NULL); if (!r.result) r.result = FN(cuCtxSynchronize)(); break;
    case LOOK:
        r.result = FN(cuMemcpyDtoH_v2)(&r.word, o->at, 4ul);
        if (!r.result) holds_in_each_word(o->at, o->bytes, r.word);
        break;
    case GIVE: r.result = give(&r.handle, o->at); break;
    case FREE: r.result = FN(cuMemFree_v2)(o->at); break;
    case ALLOC: r.at = alloc(o->bytes); r.result = FN(cuMemsetD32_v2)(r.at, o->flags, o->bytes / 4); FN(cuCtxSynchronize)(); break;
    case RANGE:
        r.result = FN(cuMemGetAddressRange_v2)(&r.at, &r.bytes, o->at);
        if (!r.result) agrees_with(o->at, r.at, r.bytes);
        break;
    case HOLD: let_wait(1, NULL); break;
    case LET_GO: ready = 1; r.result = FN(cuCtxSynchronize)(); break;
    case COPY_ELSEWHERE: copy_elsewhere(o->at, o->bytes, o->flags); break;
    case RUN_ELSEWHERE: run_elsewhere(o->at, o->handle, o->bytes, o->flags); break;
    case CLOSE_ALL: for (int i = 3; i < 4096; i++) if (i != (int)o->at) close(i); break;
    }
    return r;
}
static void begin_others(int count) {
    for (int i = 0; i < count; i++) {
        int ends[2];
        CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends));
        if (!(others[i].pid = fork())) {
            struct order order;
            for (int j = 0; j < i; j++) close(others[j].socket);
            close(ends[0]);
            while (recv(ends[1], &order, sizeof order, 0) == sizeof order) {
                if (order.what == CLOSE_ALL) order.at = ends[1];
                struct result result = obey(&order);
                send(ends[1], &result, sizeof result, MSG_NOSIGNAL);
            }
            exit(0);
        }
        close(ends[1]);
        others[i].socket = ends[0];
    }
}
static struct result ask(int i, struct order order) {
    struct result result;
    EXPECT(send(others[i].socket, &order, sizeof order, MSG_NOSIGNAL) == sizeof order);
    EXPECT(recv(others[i].socket, &result, sizeof result, 0) == sizeof result);
    return result;
}
#define ASK(i, ...) ask(i, (struct order){__VA_ARGS__})
static uint64_t opened(int i, struct handle handle) {
    struct result r = ASK(i, OPEN, handle, .flags = 1);
    CHECK(r.result);
    return r.at;
}
static uint32_t seen(int i, uint64_t at, size_t bytes) {
    struct result r = ASK(i, LOOK, .at = at, .bytes = bytes);
    CHECK(r.result);
    return r.word;
}
static void end_others(int count) {
    for (int i = 0; i < count; i++) {
        int status;
        close(others[i].socket);
        EXPECT(waitpid(others[i].pid, &status, 0) == others[i].pid && (status == 0 || status == SIGKILL));
    }
}
static uint64_t filled(size_t bytes, uint32_t word) {
    uint64_t at = alloc(bytes);
    CHECK(FN(cuMemsetD32_v2)(at, word, bytes / 4));
    CHECK(FN(cuCtxSynchronize)());
    return at;
}

static void answers(void) {
    struct handle handle, inner, again, zeros = {0};
    begin_others(3);
    start();
    load_kernel();
    uint64_t a = filled(BYTES, 7), at;
    CHECK(give(&handle, a));
    CHECK(give(&inner, a + 3 * MIB + 512));
    CHECK(give(&again, a));
    EXPECT(same(handle, inner) && same(handle, again));
    holds_in_each_word(a, BYTES, 7);
    EXPECT(give(&again, a + (1ul << 45)) == 1 && give(&again, 0) == 1);
    EXPECT(take(&at, handle, 1) == 201);
    ASK(0, START);
    uint64_t b = opened(0, handle);
    EXPECT(seen(0, b, BYTES) == 7 && opened(0, inner) == b);
    EXPECT(ASK(0, OPEN, handle, .flags = 0).result == 1 && ASK(0, OPEN, handle, .flags = 2).result == 1);
    EXPECT(ASK(0, OPEN, zeros, .flags = 1).result == 1);
    /* Both see what the other has done. */
    CHECK(ASK(0, ADD, .at = b, .bytes = BYTES).result);
    holds_in_each_word(a, BYTES, 8);
    CHECK(launch(a, BYTES / 4, 100, NULL));
    CHECK(FN(cuCtxSynchronize)());
    EXPECT(seen(0, b, BYTES) == 9);
    EXPECT(ASK(0, FREE, .at = b).result && ASK(0, GIVE, .at = b).result == 1);
    struct result range = ASK(0, RANGE, .at = b + BYTES - 1);
    EXPECT(!range.result && range.at == b && range.bytes == BYTES);
    EXPECT(ASK(0, CLOSE, .at = b + MIB).result == 1);
    CHECK(ASK(0, CLOSE, .at = b).result);
    EXPECT(seen(0, b, BYTES) == 9);
    CHECK(ASK(0, CLOSE, .at = b).result);
    EXPECT(ASK(0, CLOSE, .at = b).result == 1 && ASK(0, LOOK, .at = b, .bytes = 4).result);
    /* The memory outlives its free while somebody has it. */
    b = opened(0, handle);
    CHECK(FN(cuMemFree_v2)(a));
    EXPECT(seen(0, b, BYTES) == 9);
    ASK(1, START);
    EXPECT(ASK(1, OPEN, handle, .flags = 1).result == 1);
    uint64_t next = filled(BYTES, 1);
    EXPECT(seen(0, b, BYTES) == 9);
    CHECK(give(&again, next));
    EXPECT(!same(again, handle));
    CHECK(ASK(0, CLOSE, .at = b).result);
    /* So it does the death of its process. */
    ASK(2, START);
    struct result theirs = ASK(2, ALLOC, .bytes = BYTES, .flags = 5), given = ASK(2, GIVE, .at = theirs.at);
    CHECK(given.result);
    CHECK(take(&at, given.handle, 1));
    holds_in_each_word(at, BYTES, 5);
    CHECK(kill(others[2].pid, SIGKILL));
    waitid(P_PID, others[2].pid, &(siginfo_t){0}, WEXITED | WNOWAIT);
    holds_in_each_word(at, BYTES, 5);
    EXPECT(ASK(1, OPEN, given.handle, .flags = 1).result == 400);
    CHECK(FN(cuIpcCloseMemHandle)(at));
    CHECK(FN(cuMemFree_v2)(next));
    end_others(3);
}

/* Small allocations may share a slab: each has its handle, and none gets the bytes of another while it is shared. */
static void small(void) {
    struct handle first, second;
    begin_others(1);
    start();
    load_kernel();
    uint64_t one = filled(SMALL, 1), two = filled(SMALL, 2), three = filled(SMALL, 3);
    CHECK(give(&second, two));
    CHECK(give(&first, one));
    EXPECT(!works_by_us() || !same(first, second));
    ASK(0, START);
    uint64_t b = opened(0, second);
    EXPECT(seen(0, b, SMALL) == 2);
    if (works_by_us()) EXPECT(seen(0, opened(0, first), SMALL) == 1);
    CHECK(ASK(0, ADD, .at = b, .bytes = SMALL).result);
    holds_in_each_word(one, SMALL, 1);
    holds_in_each_word(two, SMALL, 3);
    holds_in_each_word(three, SMALL, 3);
    CHECK(FN(cuMemFree_v2)(two));
    for (int i = 0; i < 300; i++) filled(SMALL, 9);
    EXPECT(seen(0, b, SMALL) == 3);
    CHECK(FN(cuMemFree_v2)(one));
    CHECK(FN(cuMemFree_v2)(three));
    end_others(1);
}

/* Work runs on the memory when its handle is asked for, and other threads submit more all the time. */
static uint64_t busy;
static volatile int stops;
static uint32_t launches;
static void *keeps_busy(void *nothing) {
    CHECK(FN(cuCtxSetCurrent)(context));
    for (; !stops; launches++) {
        CHECK(launch(busy, BYTES / 4, 3000, NULL));
        if (launches % 8 == 7) CHECK(FN(cuCtxSynchronize)());
    }
    return NULL;
}
static void in_use(void) {
    struct handle handle;
    pthread_t thread;
    begin_others(1);
    start();
    load_kernel();
    busy = filled(BYTES, 0);
    CHECK(pthread_create(&thread, NULL, keeps_busy, NULL));
    while (launches < 10) usleep(500);
    CHECK(give(&handle, busy));
    uint32_t then = launches;
    while (launches < then + 10) usleep(500);
    stops = 1;
    CHECK(pthread_join(thread, NULL));
    CHECK(FN(cuCtxSynchronize)());
    holds_in_each_word(busy, BYTES, launches);
    ASK(0, START);
    EXPECT(seen(0, opened(0, handle), BYTES) == launches);
    end_others(1);
}

/* All descriptors that the program does not know are closed. Files of its own have the numbers then, and can be read. */
static void close_unknown(void) {
    for (int i = 3; i < 4096; i++) if (i != others[0].socket) close(i);
    for (int i = 0; i < 64; i++) EXPECT(eventfd(1, 0) >= 0);
}

/* Two processes work on shared memory in turns, and both have memory that moves. */
static void take_turns(int closes) {
    struct handle handle;
    begin_others(1);
    start();
    load_kernel();
    uint64_t moves = filled(400 * MIB, 0), shared = filled(BYTES, 0);
    CHECK(give(&handle, shared));
    ASK(0, START);
    uint64_t theirs = ASK(0, ALLOC, .bytes = 64 * MIB, .flags = 0).at, b = opened(0, handle);
    if (closes) close_unknown();
    uint32_t rounds = 0;
    do {
        CHECK(launch(moves, 400 * MIB / 4, 1000, NULL));
        CHECK(launch(shared, BYTES / 4, 1000, NULL));
        CHECK(FN(cuCtxSynchronize)());
        CHECK(ASK(0, ADD, .at = b, .bytes = BYTES).result);
        CHECK(ASK(0, ADD, .at = theirs, .bytes = 64 * MIB).result);
        rounds++;
        EXPECT(holds(shared, BYTES, 2 * MIB, 2 * rounds));
    } while (goes_on());
    EXPECT(seen(0, b, BYTES) == 2 * rounds && seen(0, theirs, 64 * MIB) == rounds);
    EXPECT(holds(moves, 400 * MIB, 2 * MIB, rounds));
    end_others(1);
}
static void turns(void) { take_turns(0); }
static void closes(void) { take_turns(1); }

/* Memory that the other process opens for a moment, again and again, also while it is away, and memory that moves. */
static void lent(void) {
    struct handle handle;
    begin_others(1);
    start();
    load_kernel();
    uint64_t moves = filled(400 * MIB, 0), shared = filled(BYTES, 0), part = filled(SMALL, 5);
    struct handle small;
    CHECK(give(&handle, shared));
    CHECK(give(&small, part));
    ASK(0, START);
    uint32_t rounds = 0;
    do {
        CHECK(launch(moves, 400 * MIB / 4, 1000, NULL));
        CHECK(launch(shared, BYTES / 4, 1000, NULL));
        CHECK(FN(cuCtxSynchronize)());
        usleep(rounds % 4 * 60000);
        uint64_t b = opened(0, handle), c = opened(0, small);
        EXPECT(opened(0, handle) == b);
        CHECK(ASK(0, CLOSE, .at = b).result);
        CHECK(ASK(0, ADD, .at = b, .bytes = BYTES).result);
        EXPECT(seen(0, c, SMALL) == 5);
        CHECK(ASK(0, CLOSE, .at = c).result);
        CHECK(ASK(0, CLOSE, .at = b).result);
        rounds++;
        EXPECT(holds(shared, BYTES, 2 * MIB, 2 * rounds));
    } while (goes_on());
    EXPECT(holds(moves, 400 * MIB, 2 * MIB, rounds));
    end_others(1);
}

/* The other process ends while it has the memory. Without a scheduler's word nothing is to be seen of it here. */
static void abandoned(void) {
    struct handle handle;
    const char *wake = getenv("WAKE");
    begin_others(2);
    start();
    load_kernel();
    uint64_t shared = filled(BYTES, 7);
    CHECK(give(&handle, shared));
    ASK(0, START);
    ASK(1, START);
    opened(0, handle);
    uint64_t b = opened(1, handle);
    while (access(wake, F_OK)) usleep(1000);
    /* Nobody waits for the process, so the kernel keeps its number. */
    CHECK(kill(others[0].pid, SIGKILL));
    CHECK(ASK(1, CLOSE, .at = b).result);
    while (goes_on()) usleep(1000);
    holds_in_each_word(shared, BYTES, 7);
    end_others(2);
}

/* A process opens memory that is away. It waits for the turn of the other, which has it, or which ends before. */
static void waits(void) {
    begin_others(3);
    start();
    load_kernel();
    for (int i = 0; i < 3; i++) ASK(i, START);
    struct handle handles[2];
    for (int i = 0; i < 2; i++) {
        struct result theirs = ASK(i, ALLOC, .bytes = 300 * MIB, .flags = 5 + i), given = ASK(i, GIVE, .at = theirs.at);
        CHECK(given.result);
        handles[i] = given.handle;
    }
    uint64_t mine = filled(800 * MIB, 1), small = filled(4 * MIB, 9);
    struct handle resident;
    CHECK(give(&resident, small));
    CHECK(launch(mine, 800 * MIB / 4, 1000, NULL));
    let_wait(1, NULL);
    ASK(2, OPEN_ASIDE, .handle = handles[0], .flags = 1);
    usleep(300000);
    /* Another process answers at once meanwhile. */
    struct order order = {OPENED};
    uint64_t a = opened(2, resident);
    EXPECT(send(others[2].socket, &order, sizeof order, 0) == sizeof order);
    struct result result;
    usleep(100000);
    EXPECT(recv(others[2].socket, &result, sizeof result, MSG_DONTWAIT) < 0);
    CHECK(kill(others[0].pid, SIGKILL));
    EXPECT(recv(others[2].socket, &result, sizeof result, 0) == sizeof result && result.result == 400);
    CHECK(ASK(2, CLOSE, .at = a).result);
    ready = 1;
    uint64_t b = opened(2, handles[1]);
    EXPECT(seen(2, b, 300 * MIB) == 6);
    CHECK(ASK(2, CLOSE, .at = b).result);
    CHECK(FN(cuCtxSynchronize)());
    holds_in_each_word(mine, 800 * MIB, 2);
    end_others(3);
}

/* A process opens memory that is away, and cannot come back: the card is lost to the process that it is of. */
static void lost(void) {
    struct handle handle;
    const char *file = getenv("NVSIM_LOST");
    struct order order = {OPEN, .flags = 1};
    struct result result;
    unsetenv("NVSIM_LOST");
    begin_others(1);
    setenv("NVSIM_LOST", file, 1);
    start();
    CHECK(give(&handle, filled(BYTES, 7)));
    ASK(0, START);
    struct result theirs = ASK(0, ALLOC, .bytes = 990 * MIB, .flags = 5);
    CHECK(ASK(0, ADD, .at = theirs.at, .bytes = 990 * MIB).result);
    EXPECT(creat(file, 0600) >= 0);
    order.handle = handle;
    EXPECT(send(others[0].socket, &order, sizeof order, 0) == sizeof order);
    EXPECT(recv(others[0].socket, &result, sizeof result, 0) == sizeof result && result.result == 214);
    EXPECT(seen(0, theirs.at, 990 * MIB) == 6);
    end_others(1);
}

/* A process opens memory of one that has gone off the card. */
static void asleep(void) {
    struct handle handle;
    const char *wake = getenv("WAKE");
    begin_others(1);
    start();
    uint64_t shared = filled(BYTES, 7);
    CHECK(give(&handle, shared));
    puts("ready");
    fflush(stdout);
    while (access(wake, F_OK)) usleep(1000);
    ASK(0, START);
    uint64_t b = opened(0, handle);
    EXPECT(seen(0, b, BYTES) == 7);
    CHECK(ASK(0, ADD, .at = b, .bytes = BYTES).result);
    CHECK(ASK(0, CLOSE, .at = b).result);
    holds_in_each_word(shared, BYTES, 8);
    end_others(1);
}

/* Opened memory is another card's to work on: copies need nothing for it, and kernels need peer access. */
static void cards(void) {
    struct handle first, second;
    begin_others(2);
    start();
    uint64_t a = filled(BYTES, 7), b = filled(BYTES, 8);
    CHECK(give(&first, a));
    CHECK(give(&second, b));
    ASK(0, START);
    CHECK(ASK(0, COPY_ELSEWHERE, .at = opened(0, first), .bytes = BYTES, .flags = 7).result);
    holds_in_each_word(a, BYTES, 8);
    ASK(1, START);
    CHECK(ASK(1, RUN_ELSEWHERE, second, .at = opened(1, first), .bytes = BYTES, .flags = 8).result);
    holds_in_each_word(b, BYTES, 9);
    end_others(2);
}

/* Handles that nobody made, and processes that do what they should not. Under the library alone. */
static void hostile(void) {
    struct handle handle, forged;
    begin_others(2);
    start();
    load_kernel();
    uint64_t a = filled(BYTES, 7);
    CHECK(give(&handle, a));
    ASK(0, START);
    /* Another secret, another allocation, another address, a later form. */
    int wrong[] = {32, 47, 24, 8, 23, 63};
    for (int i = 0; i < 6; i++) {
        forged = handle;
        forged.bytes[wrong[i]] ^= 0x11;
        EXPECT(ASK(0, OPEN, forged, .flags = 1).result == (wrong[i] == 8 || wrong[i] == 23 ? 400 : 1));
    }
    uint64_t b = opened(0, handle);
    EXPECT(seen(0, b, BYTES) == 7);
    /* Work that waits for the thread which closes memory does not keep that thread. */
    ASK(0, HOLD);
    CHECK(ASK(0, CLOSE, .at = b).result);
    CHECK(ASK(0, LET_GO).result);
    /* A child of this process, which the driver does not serve, keeps nothing alive and answers nothing. */
    pid_t child = fork();
    if (!child) pause();
    ASK(1, START);
    EXPECT(seen(1, opened(1, handle), BYTES) == 7);
    CHECK(kill(child, SIGKILL));
    CHECK(waitpid(child, NULL, 0) != child);
    /* The other process closes all descriptors that it has not opened itself. */
    struct result theirs = ASK(1, ALLOC, .bytes = BYTES, .flags = 4), given = ASK(1, GIVE, .at = theirs.at);
    CHECK(given.result);
    ASK(1, CLOSE_ALL);
    EXPECT(ASK(0, OPEN, given.handle, .flags = 1).result == 400);
    given = ASK(1, GIVE, .at = theirs.at);
    CHECK(given.result);
    EXPECT(seen(0, opened(0, given.handle), BYTES) == 4);
    uint64_t late = ASK(1, ALLOC, .bytes = BYTES, .flags = 6).at;
    given = ASK(1, GIVE, .at = late);
    CHECK(given.result);
    EXPECT(seen(0, opened(0, given.handle), BYTES) == 6);
    /* A process that stopped is not waited for for ever. */
    int status;
    CHECK(kill(others[1].pid, SIGSTOP));
    EXPECT(waitpid(others[1].pid, &status, WUNTRACED) == others[1].pid && WIFSTOPPED(status));
    forged = given.handle;
    forged.bytes[47] ^= 1;
    EXPECT(ASK(0, OPEN, forged, .flags = 1).result == 400);
    CHECK(kill(others[1].pid, SIGCONT));
    end_others(2);
}

/* Large memory takes few descriptors of the process, and never more than half of those that it may have. Under the library alone. */
static int open_descriptors(void) {
    int count = 0;
    for (int i = 0; i < 1024; i++) count += fcntl(i, F_GETFD) >= 0;
    return count;
}
static void descriptors(void) {
    struct handle handle;
    begin_others(1);
    start();
    load_kernel();
    uint64_t large = filled(256 * MIB, 3), shared = 0;
    CHECK(give(&handle, filled(2 * MIB, 1)));
    int before = open_descriptors();
    CHECK(give(&handle, large));
    EXPECT(open_descriptors() == before + 1);
    holds_in_each_word(large, 256 * MIB, 3);
    ASK(0, START);
    uint64_t b = opened(0, handle);
    EXPECT(seen(0, b, 256 * MIB) == 3);
    CHECK(ASK(0, CLOSE, .at = b).result);
    CHECK(FN(cuMemFree_v2)(large));
    /* The thread that hears of the closing closes its own a moment later. */
    for (int i = 0; i < 5000 && open_descriptors() != before; i++) usleep(1000);
    EXPECT(open_descriptors() == before);
    struct rlimit limit = {64, 64};
    CHECK(setrlimit(RLIMIT_NOFILE, &limit));
    while (give(&handle, filled(2 * MIB, 1)) == 0) EXPECT(++shared < 40);
    EXPECT(shared == 31 && give(&handle, filled(2 * MIB, 1)) == 304);
    end_others(1);
}

/* The process has no descriptor left when the memory is exchanged: the next try does not exchange it again. Under the library alone. */
static void retried(void) {
    struct handle handle;
    struct rlimit all, few;
    uint64_t maps, later;
    int taken[64], count = 0;
    start();
    CHECK(give(&handle, filled(2 * MIB, 1)));
    uint64_t a = filled(64 * MIB, 3);
    CHECK(getrlimit(RLIMIT_NOFILE, &all));
    few = all;
    few.rlim_cur = 64;
    CHECK(setrlimit(RLIMIT_NOFILE, &few));
    while ((taken[count] = dup(2)) >= 0) count++;
    EXPECT(give(&handle, a) != 0);
    while (count) close(taken[--count]);
    CHECK(setrlimit(RLIMIT_NOFILE, &all));
    CHECK(FN(nvsimMapped)(&maps));
    CHECK(give(&handle, a));
    CHECK(FN(nvsimMapped)(&later));
    EXPECT(maps == later);
    holds_in_each_word(a, 64 * MIB, 3);
}

/* The process may have one more descriptor, so large memory is exchanged as one; and other programs have filled the card. */
static void full(void) {
    struct handle handle;
    const char *wake = getenv("WAKE");
    start();
    load_kernel();
    uint64_t moves = filled(200 * MIB, 0), large = filled(1280 * MIB, 3);
    struct rlimit limit = {64, 64};
    CHECK(setrlimit(RLIMIT_NOFILE, &limit));
    for (int i = 0; i < 31; i++) CHECK(give(&handle, filled(2 * MIB, 1)));
    uint32_t rounds = 0;
    for (; access(wake, F_OK); rounds++) {
        CHECK(launch(moves, 200 * MIB / 4, 1000, NULL));
        CHECK(FN(cuCtxSynchronize)());
    }
    CHECK(give(&handle, large));
    holds_in_each_word(large, 1280 * MIB, 3);
    EXPECT(holds(moves, 200 * MIB, 2 * MIB, rounds));
}

int main(int argc, char **argv) {
    struct { const char *name; void (*does)(void); } all[] = {{"answers", answers}, {"small", small}, {"in use", in_use}, {"turns", turns}, {"hostile", hostile}, {"descriptors", descriptors}, {"cards", cards}, {"full", full}, {"retried", retried}, {"lent", lent}, {"abandoned", abandoned}, {"closes", closes}, {"waits", waits}, {"lost", lost}, {"asleep", asleep}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (argc > 1 && !strcmp(all[i].name, argv[1])) { all[i].does(); return 0; }
    return 2;
}
