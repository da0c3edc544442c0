/* A library that is linked to a function of the driver that has no hook. */
int cuEventElapsedTime(float *, void *, void *);
int elapsed(float *milliseconds, void *begin, void *end) { return cuEventElapsedTime(milliseconds, begin, end); }
