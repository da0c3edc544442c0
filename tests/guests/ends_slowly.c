/* A program has memory, gives the GPU nothing to do until the file GO exists, and ends when the file END exists, or after a minute. With an
   argument, another one has the GPU meanwhile, and allocates what the first one still has there when the file WAKE exists. */
#include "guest.h"
static void linger(void) {
    printf("ends\n");
    fflush(stdout);
    for (int i = 0; i < 60000 && access(getenv("END"), F_OK) != 0; i++) usleep(1000);
}
static uint64_t use(size_t bytes) {
    uint64_t memory = alloc(bytes);
    CHECK(FN(cuMemsetD32_v2)(memory, 7, bytes / 4));
    CHECK(FN(cuCtxSynchronize)());
    return memory;
}
int main(int argc, char **argv) {
    (void)argv;
    /* The handlers of the library and the driver come later, and so they run first. */
    if (argc == 1) CHECK(atexit(linger));
    start();
    use(argc == 1 ? 512 * MIB : 768 * MIB);
    printf("has memory\n");
    fflush(stdout);
    const char *file = getenv(argc == 1 ? "GO" : "WAKE");
    EXPECT(file);
    while (access(file, F_OK) != 0) usleep(1000);
    if (argc > 1) use(128 * MIB);
    return 0;
}
