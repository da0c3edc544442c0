/* A function that is built in and never called shows nothing. */
#define NEVER
#include "shares_built_in.c"
