/* A thread makes an allocation, which the driver holds up; another thread asks for the lock meanwhile. Where the library maps the memory, the
   driver is asked for it when the lock comes. */
#include "guest.h"
#define BYTES (256 * MIB)
static volatile uint64_t memory_;
static void *allocates(void *argument) {
    CHECK(FN(cuCtxSetCurrent)(context));
    memory_ = alloc(BYTES);
    return argument;
}
int main(void) {
    pthread_t thread;
    char waits[512];
    const char *held = held_file();
    EXPECT(held);
    snprintf(waits, sizeof waits, "%s.waits", held);
    start();
    load_kernel();
    fclose(fopen(held, "w"));
    CHECK(pthread_create(&thread, NULL, allocates, NULL));
    /* The allocation is under way, and counts. */
    while (!memory_ && access(waits, F_OK)) usleep(1000);
    CHECK(launch(0, 0, 0, NULL));
    CHECK(FN(cuCtxSynchronize)());
    CHECK(pthread_join(thread, NULL));
    do {
        CHECK(launch(memory_, BYTES / 4, 100, NULL));
        CHECK(FN(cuCtxSynchronize)());
    } while (goes_on());
    return 0;
}
