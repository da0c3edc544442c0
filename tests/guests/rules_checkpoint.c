/* A process takes itself off the cards and comes back. A context takes 32 MiB here, and a module 4 MiB. */
#include "rules.h"

#define WAIT_MS 2000
static uint64_t memory_;
static void *stream_, *event_;
static uint64_t arguments_[8];

static int checkpoint(const char *step) {
    char name[64];
    snprintf(name, sizeof name, "cuCheckpointProcess%s", step);
    arguments_[0] = strcmp(step, "Lock") ? 0 : WAIT_MS;
    return ((int (*)())look_up(name))(getpid(), arguments_);
}
static int state(void) {
    int state = -1;
    CHECK(FN(cuCheckpointProcessGetState)(getpid(), &state));
    return state;
}
static void go(void) { CHECK(checkpoint("Lock")); CHECK(checkpoint("Checkpoint")); }
static void come_back(void) { CHECK(checkpoint("Restore")); CHECK(checkpoint("Unlock")); }
static void begin(void) {
    start();
    load_kernel();
    memory_ = alloc(8 * MIB);
    stream_ = new_stream(NON_BLOCKING);
    event_ = new_event();
    CHECK(FN(cuMemsetD32_v2)(memory_, 7, 2 * MIB));
}

/* Another process on the card: it says what is free there, or takes all of it. It starts before this process meets the driver. */
static int ask_[2], tell_[2];
static void other_process(void) {
    char word;
    uint64_t all;
    start();
    while (read(ask_[0], &word, 1) == 1) {
        size_t left = free_bytes();
        if (word == 't') CHECK(FN(cuMemAlloc_v2)(&all, left));
        EXPECT(write(tell_[1], &left, sizeof left) == sizeof left);
    }
    _exit(0);
}
static void meet_other(void) {
    EXPECT(pipe(ask_) == 0 && pipe(tell_) == 0);
    if (fork() == 0) {
        close(ask_[1]);
        other_process();
    }
    close(ask_[0]);
}
static size_t ask(char word) {
    size_t left;
    EXPECT(write(ask_[1], &word, 1) == 1 && read(tell_[0], &left, sizeof left) == sizeof left);
    return left;
}

static void a_process_goes_and_comes_back(void) {
    meet_other();
    size_t before = ask('f');
    begin();
    size_t with = ask('f');
    EXPECT(before - with == (32 + 4 + 8) * MIB);
    for (int cycle = 0; cycle < 3; cycle++) {
        go();
        EXPECT(state() == 2);
        EXPECT(ask('f') == before);
        come_back();
        EXPECT(state() == 0);
        EXPECT(ask('f') == with);
        CHECK(launch(memory_, 2 * MIB, 1, stream_));
        CHECK(FN(cuStreamSynchronize)(stream_));
        holds_in_each_word(memory_, 8 * MIB, 8 + cycle);
    }
}

static void *lock_thread(void *none) { CHECK(checkpoint("Lock")); return none; }
static void a_lock_waits_for_work(void) {
    pthread_t locker;
    begin();
    hold(stream_);
    CHECK(pthread_create(&locker, NULL, lock_thread, NULL));
    a_while();
    EXPECT(state() == 0);
    release();
    CHECK(pthread_join(locker, NULL));
    EXPECT(state() == 1);
    CHECK(checkpoint("Unlock"));
    /* And not for ever. */
    hold(stream_);
    EXPECT(checkpoint("Lock") == NOT_READY);
    EXPECT(state() == 0);
    CHECK(FN(cuMemsetD32_v2)(memory_, 1, 4ul));
    release();
    CHECK(FN(cuStreamSynchronize)(stream_));
}

static uint64_t spare_;
static void nothing(void *data) { (void)data; }
static int call_alloc(void) { uint64_t base; return FN(cuMemAlloc_v2)(&base, 2 * MIB); }
static int call_free(void) { return FN(cuMemFree_v2)(spare_); }
static int call_copy(void) { uint32_t word; return FN(cuMemcpyDtoH_v2)(&word, memory_, 4ul); }
static int call_fill(void) { return FN(cuMemsetD32_v2)(memory_, 1, 4ul); }
static int call_host_function(void) { return FN(cuLaunchHostFunc)(stream_, nothing, NULL); }
static int call_stream(void) { void *stream; return FN(cuStreamCreate)(&stream, 1); }
static int call_launch(void) { return launch(memory_, 4, 1, stream_); }
static int (*const waiting_[])(void) = {call_alloc, call_free, call_copy, call_fill, call_host_function, call_stream, call_launch};
#define WAITING ((long)(sizeof waiting_ / sizeof *waiting_))
static int begun_, done_;
static void *wait_thread(void *call) {
    CHECK(FN(cuCtxSetCurrent)(context));
    __sync_fetch_and_add(&begun_, 1);
    CHECK(((int (*)(void))call)());
    __sync_fetch_and_add(&done_, 1);
    return NULL;
}
/* The calls that wait do so until the process is unlocked, and succeed then. */
static void wait_through(void (*meanwhile)(void), void (*then)(void)) {
    pthread_t threads[WAITING];
    for (long i = 0; i < WAITING; i++) CHECK(pthread_create(&threads[i], NULL, wait_thread, waiting_[i]));
    while (begun_ < WAITING) usleep(100);
    meanwhile();
    a_while();
    EXPECT(done_ == 0);
    then();
    for (long i = 0; i < WAITING; i++) CHECK(pthread_join(threads[i], NULL));
}
static void answers_while_locked(void) {
    int version;
    void *current;
    EXPECT(free_bytes() > 0);
    CHECK(FN(cuCtxSynchronize)());
    CHECK(FN(cuDriverGetVersion)(&version));
    CHECK(FN(cuCtxGetCurrent)(&current));
}
static void unlock(void) { CHECK(checkpoint("Unlock")); }
static void calls_of_a_locked_process(void) {
    begin();
    spare_ = alloc(2 * MIB);
    CHECK(checkpoint("Lock"));
    wait_through(answers_while_locked, unlock);
}

static void answers_while_away(void) {
    size_t left, total;
    int value;
    EXPECT(FN(cuMemGetInfo_v2)(&left, &total) == 304);
    CHECK(FN(cuDeviceGetAttribute)(&value, 16, 0));
    CHECK(FN(cuDriverGetVersion)(&value));
}
static void *go_thread(void *none) { go(); return none; }
static void stops_while_away(int which) {
    begin();
    go();
    if (which == 0) FN(cuCtxSynchronize)();
    if (which == 1) FN(cuStreamQuery)(stream_);
    if (which == 2) FN(cuEventQuery)(event_);
    if (which == 3) FN(cuStreamSynchronize)(stream_);
}
static void calls_of_a_process_that_is_away(void) {
    static const char *const names[] = {"cuCtxSynchronize", "cuStreamQuery", "cuEventQuery", "cuStreamSynchronize"};
    for (int i = 0; i < 4; i++) {
        char said[500];
        int status = in_process(stops_while_away, i, said, sizeof said);
        EXPECT(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
        EXPECT(strstr(said, names[i]) && strstr(said, "off the card"));
    }
    begin();
    spare_ = alloc(2 * MIB);
    in_thread(go_thread, NULL);
    wait_through(answers_while_away, come_back);
    /* A child has no driver, whatever the state of its parent. */
    go();
    int status;
    pid_t child = fork();
    if (child == 0) _exit(FN(cuMemcpyDtoH_v2)(&status, memory_, 4ul) == 3 ? 0 : 1);
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
    come_back();
}

static void is_refused(int which) {
    uint64_t base;
    char handle[64];
    begin();
    if (which == 0) CHECK(FN(cuMemAllocManaged)(&base, 4 * MIB, 1));
    if (which == 1) CHECK(FN(cuIpcGetMemHandle)(handle, memory_));
    CHECK(checkpoint("Lock"));
    EXPECT(checkpoint("Checkpoint") == 801);
    EXPECT(checkpoint("Checkpoint") == 999);
    EXPECT(state() == 1);
    CHECK(checkpoint("Unlock"));
    CHECK(launch(memory_, 2 * MIB, 1, stream_));
    CHECK(FN(cuStreamSynchronize)(stream_));
    holds_in_each_word(memory_, 8 * MIB, 8);
}
static void what_is_refused(void) {
    for (int which = 0; which < 2; which++) {
        char said[500];
        int status = in_process(is_refused, which, said, sizeof said);
        EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        EXPECT(!strcmp(said, "it went on\n"));
    }
}

/* The driver takes a process that has a pool of managed memory, and cannot bring it back. */
static void a_pool_of_managed_memory(void) {
    int of_managed[32] = {2, 0, 1, 0}, card[2] = {1, 0};
    void *pool;
    begin();
    CHECK(FN(cuMemPoolCreate)(&pool, of_managed));
    CHECK(FN(cuMemPoolDestroy)(pool));
    go();
    come_back();
    CHECK(FN(cuMemGetDefaultMemPool)(&pool, card, 1));
    go();
    come_back();
    CHECK(FN(cuMemGetDefaultMemPool)(&pool, card, 2));
    go();
    for (int i = 0; i < 2; i++) EXPECT(checkpoint("Restore") == 304);
    EXPECT(checkpoint("Unlock") == 401);
    EXPECT(state() == 2);
}

static void memory_of_a_descriptor_stays(void) {
    struct { int type, handles, place, device; void *windows; char flags[8]; } properties = {1, 1, 1, 0, NULL, {0}};
    uint64_t physical;
    int descriptor;
    meet_other();
    size_t before = ask('f');
    begin();
    CHECK(FN(cuMemCreate)(&physical, 4 * MIB, &properties, 0ul));
    go();
    EXPECT(ask('f') == before);
    come_back();
    CHECK(FN(cuMemExportToShareableHandle)(&descriptor, physical, 1, 0ul));
    go();
    EXPECT(before - ask('f') == 4 * MIB);
    come_back();
}

static void a_restore_without_room(void) {
    size_t left, total;
    meet_other();
    ask('f');
    begin();
    go();
    EXPECT(ask('t') > 0);
    EXPECT(checkpoint("Restore") == 2);
    EXPECT(state() == 3);
    EXPECT(checkpoint("Restore") == 401);
    EXPECT(checkpoint("Unlock") == 401);
    EXPECT(FN(cuMemGetInfo_v2)(&left, &total) == 304);
    EXPECT(FN(cuMemsetD32_v2)(memory_, 1, 4ul) == 304);
}

static void the_order_of_the_calls(void) {
    begin();
    EXPECT(checkpoint("Checkpoint") == 401);
    EXPECT(checkpoint("Restore") == 401);
    EXPECT(checkpoint("Unlock") == 401);
    EXPECT(FN(cuCheckpointProcessLock)(getppid(), arguments_) == 800);
    CHECK(checkpoint("Lock"));
    EXPECT(checkpoint("Lock") == 401);
    EXPECT(checkpoint("Restore") == 401);
    CHECK(checkpoint("Checkpoint"));
    EXPECT(checkpoint("Checkpoint") == 401);
    EXPECT(checkpoint("Unlock") == 401);
    come_back();
}

static void goes_and_exits(int how) {
    begin();
    go();
    if (how == 0) exit(0);
    kill(getpid(), SIGKILL);
}
static void a_process_ends_while_it_is_away(void) {
    meet_other();
    size_t before = ask('f');
    for (int how = 0; how < 2; how++) {
        char said[500];
        int status = in_process(goes_and_exits, how, said, sizeof said);
        EXPECT(how == 0 ? WIFEXITED(status) && WEXITSTATUS(status) == 0 : WIFSIGNALED(status));
        EXPECT(!said[0]);
        EXPECT(ask('f') == before);
    }
}

/* The stacks take 8 MiB here for each KiB of their limit. */
static void the_stacks_of_kernels(void) {
    uint64_t taken;
    size_t limit;
    meet_other();
    size_t before = ask('f');
    begin();
    size_t with = ask('f');
    EXPECT(before - with == (32 + 8 + 4 + 8) * MIB);
    CHECK(FN(cuCtxGetLimit)(&limit, 0));
    EXPECT(limit == 1024);
    EXPECT(FN(cuCtxGetLimit)(&limit, 99) == 215 && FN(cuCtxSetLimit)(99, 1024ul) == 215);
    CHECK(FN(cuCtxSetLimit)(0, 4096ul));
    EXPECT(with - ask('f') == 24 * MIB);
    CHECK(FN(cuCtxSetLimit)(0, 0ul));
    EXPECT(ask('f') - with == 8 * MIB);
    go();
    come_back();
    CHECK(FN(nvsimTaken)(&taken));
    EXPECT(taken == (32 + 4 + 8) * MIB);
    CHECK(launch(memory_, 4, 1, stream_));
    CHECK(FN(cuCtxSynchronize)());
    CHECK(FN(cuCtxSetLimit)(0, 1024ul));
    /* The first kernel since waits for the work that runs. The next one does not. */
    void *other = new_stream(NON_BLOCKING);
    hold(stream_);
    CHECK(launch(memory_, 4, 1, other));
    a_while();
    EXPECT(FN(cuStreamQuery)(other) == NOT_READY);
    release();
    CHECK(FN(cuCtxSynchronize)());
    hold(stream_);
    CHECK(launch(memory_, 4, 1, other));
    CHECK(FN(cuStreamSynchronize)(other));
    release();
    CHECK(FN(cuCtxSynchronize)());
    CHECK(FN(cuCtxGetLimit)(&limit, 0));
    EXPECT(limit == 1024 && ask('f') == with);
    CHECK(FN(cuDevicePrimaryCtxRelease_v2)(0));
    EXPECT(ask('f') == before);
}

RULES(RULE(a_process_goes_and_comes_back), RULE(a_lock_waits_for_work), RULE(calls_of_a_locked_process), RULE(calls_of_a_process_that_is_away), RULE(what_is_refused), RULE(a_pool_of_managed_memory), RULE(the_stacks_of_kernels),
      RULE(memory_of_a_descriptor_stays), RULE(a_restore_without_room), RULE(the_order_of_the_calls), RULE(a_process_ends_while_it_is_away))
