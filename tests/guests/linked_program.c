/* A program that is linked to the driver, and calls functions with a hook and without. */
#include <stdio.h>
int cuInit(unsigned flags);
int cuEventQuery(void *event);
int main(void) {
    int initialised = cuInit(0);
    printf("%d %d\n", initialised, cuEventQuery(0));
    return 0;
}
