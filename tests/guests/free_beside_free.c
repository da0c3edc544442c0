/* Memory that was freed in the order of a stream is being freed by a thread of the library when the program frees other memory: when
   that call returns, both are free. The driver holds the first free for a while. */
#include "guest.h"
static char waits[512];
static void *let_go(void *argument) {
    sleep(1);
    CHECK(unlink(held_file()));
    return argument;
}
int main(void) {
    pthread_t thread;
    const char *held = held_file();
    snprintf(waits, sizeof waits, "%s.waits", held);
    start();
    load_kernel();
    size_t before = free_bytes();
    uint64_t later = alloc(8 * MIB);
    CHECK(launch(later, 64, 20000, NULL));
    CHECK(FN(cuMemFreeAsync)(later, NULL));
    CHECK(FN(cuCtxSynchronize)());
    FILE *file = fopen(held, "w");
    EXPECT(file);
    fclose(file);
    /* The library looks what can be freed, and begins. */
    uint64_t now = alloc(4 * MIB);
    while (access(waits, F_OK)) usleep(1000);
    CHECK(pthread_create(&thread, NULL, let_go, NULL));
    CHECK(FN(cuMemFree_v2)(now));
    EXPECT(free_bytes() == before);
    CHECK(pthread_join(thread, NULL));
    return 0;
}
