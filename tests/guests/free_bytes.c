/* Says how many MiB are free on the card. */
#include "guest.h"
int main(void) {
    start();
    printf("%zu\n", free_bytes() / MIB);
    return 0;
}
