/* The library does not need memory of the host any more, while the program's work waits for a thread that makes a stream. The driver
   ends the page-lock when all work is complete, and keeps threads from making streams until then. */
#include "guest.h"
#include "waits.h"
enum { COUNT = 8 };
static const size_t EACH = 64 * MIB;
static volatile int goes_on_;
static void tell(const char *what) { printf("%s\n", what); fflush(stdout); }
static void keep_busy_until(const char *variable) {
    const char *path = getenv(variable);
    EXPECT(path);
    while (access(path, F_OK) != 0) {
        CHECK(launch(0, 0, 1000, NULL));
        CHECK(FN(cuCtxSynchronize)());
    }
}
/* The call that ends the page-lock is held up until the program's work waits, or is kept out. */
static void *lets_go(void *unused) {
    (void)unused;
    char waits[4096];
    snprintf(waits, sizeof waits, "%s.waits", held_file());
    while (access(waits, F_OK) != 0) usleep(1000);
    for (int i = 0; i < 150 && !begun; i++) usleep(10000);
    usleep(100000);
    unlink(held_file());
    goes_on_ = 1;
    return NULL;
}
int main(void) {
    uint64_t base[COUNT];
    void *stream, *made;
    pthread_t other;
    char waits[4096];
    start();
    load_kernel();
    CHECK(FN(cuStreamCreate)(&stream, 1));
    for (int i = 0; i < COUNT; i++) {
        base[i] = alloc(EACH);
        CHECK(FN(cuMemsetD32_v2)(base[i], 7000 + i, EACH / 4));
    }
    tell("has memory");
    keep_busy_until("WAKE");
    CHECK(pthread_create(&other, NULL, lets_go, NULL));
    for (int i = 0; i < COUNT - 1; i++) CHECK(FN(cuMemFree_v2)(base[i]));
    snprintf(waits, sizeof waits, "%s.waits", held_file());
    while (access(waits, F_OK) != 0) usleep(1000);
    let_wait(1, stream);
    while (!goes_on_) usleep(1000);
    usleep(600000);
    CHECK(FN(cuStreamCreate)(&made, 1));
    ready = 1;
    CHECK(FN(cuCtxSynchronize)());
    CHECK(pthread_join(other, NULL));
    tell("made a stream");
    keep_busy_until("STOP");
    return 0;
}
