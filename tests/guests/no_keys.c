/* The program has used up the keys of threads' own values. */
#include "guest.h"
int main(void) {
    pthread_key_t key;
    while (pthread_key_create(&key, NULL) == 0) {}
    CHECK(FN(cuInit)(0));
    uint64_t memory = alloc(4 * MIB);
    CHECK(FN(cuMemFree_v2)(memory));
    return 0;
}
