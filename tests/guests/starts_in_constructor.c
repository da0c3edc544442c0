/* A library is opened whose constructor allocates, while another thread makes the program's first allocation. */
#include "guest.h"
static volatile int opens;
static int (*allocate)(uint64_t *, size_t);
/* The library's constructor calls this. */
void in_constructor(void) {
    uint64_t base;
    opens = 1;
    usleep(500000);
    CHECK(FN(cuCtxSetCurrent)(context));
    CHECK(allocate(&base, MIB));
}
static void *open_library(void *path) {
    EXPECT(dlopen(path, RTLD_NOW));
    return NULL;
}
int main(int count, char **arguments) {
    EXPECT(count == 2);
    uint64_t base;
    pthread_t thread;
    start();
    allocate = (void *)FN(cuMemAlloc_v2);
    alarm(20);
    CHECK(pthread_create(&thread, NULL, open_library, arguments[1]));
    while (!opens) usleep(100);
    CHECK(allocate(&base, MIB));
    CHECK(pthread_join(thread, NULL));
    return 0;
}
