/* The process ends from another thread, in the middle of its work. */
#include "guest.h"
static void *leave(void *argument) { (void)argument; usleep(20000); exit(0); }
int main(void) {
    start();
    load_kernel();
    uint64_t base = alloc(64 * MIB);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, leave, NULL));
    for (;;) launch(base, 64, 1000, NULL);
}
