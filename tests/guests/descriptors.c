/* The program closes every descriptor that it did not open, and later has no descriptor left: it goes on. */
#include "guest.h"
#include <fcntl.h>
#include <sys/resource.h>
int main(void) {
    start();
    load_kernel();
    uint64_t base = alloc(64 * MIB);
    CHECK(launch(base, 64, 100, NULL));
    for (int fd = 0; fd < 1024; fd++) close(fd);
    for (int i = 0; i < 50; i++) CHECK(launch(base, 64, 1000, NULL));
    int kept[8];
    for (int i = 0; i < 8; i++) kept[i] = open("/dev/null", O_RDWR);
    for (int i = 0; i < 100; i++) { CHECK(launch(base, 64, 1000, NULL)); usleep(2000); }
    /* Nobody else writes to the program's descriptors, or closes them. */
    for (int i = 0; i < 8; i++) EXPECT(fcntl(kept[i], F_GETFD) >= 0);
    struct rlimit none = {8, 8};
    setrlimit(RLIMIT_NOFILE, &none);
    for (int i = 0; i < 100; i++) { CHECK(launch(base, 64, 1000, NULL)); usleep(2000); }
    CHECK(FN(cuCtxSynchronize)());
    return 0;
}
