/* It is linked to a function of the driver that is newer than the library, and needs nothing else that would be exported. */
int cuInit(unsigned flags);
int cuLaunchTomorrow(void *stream);
int main(void) { return cuInit(0) || cuLaunchTomorrow(0); }
