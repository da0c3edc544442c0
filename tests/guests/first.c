/* The shortest use of a GPU: the first calls, and the end. */
#include "guest.h"
int main(void) {
    CHECK(FN(cuInit)(0));
    alloc(MIB);
    CHECK(launch(0, 0, 0, NULL));
    return 0;
}
