/* A client of the benchmark of the host's share: it waits for ever with a little memory ("idle"), launches ahead of its work
   ("ahead"), or waits for each kernel ("waits"). */
#include "guest.h"
#include <sys/prctl.h>
int main(int argc, char **argv) {
    EXPECT(argc == 2);
    CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL));
    start();
    load_kernel();
    uint64_t memory = alloc(4 * MIB);
    int is_ahead = !strcmp(argv[1], "ahead");
    do {
        for (int i = 0; i < (is_ahead ? 500 : 1); i++) CHECK(launch(memory, 64, is_ahead ? 200 : 5000, NULL));
        CHECK(FN(cuCtxSynchronize)());
    } while (strcmp(argv[1], "idle"));
    for (;;) pause();
}
