/* A library that is linked to a function of the driver that has no hook. */
int cuEventQuery(void *);
int query(void *event) { return cuEventQuery(event); }
