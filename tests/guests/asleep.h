/* Whether threads of this process sleep, as the kernel says. A thread that only lacks a processor is ready to run, and does not. */
#include <sys/syscall.h>
static pid_t this_thread(void) { return syscall(SYS_gettid); }
/* The first line of a file about a thread; empty: there is none. */
static const char *said_of(pid_t thread, const char *file) {
    static __thread char text[512];
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/%s", thread, file);
    FILE *about = fopen(path, "r");
    if (!about || !fgets(text, sizeof text, about)) *text = 0;
    if (about) fclose(about);
    return text;
}
static int is_asleep(pid_t thread) {
    /* The name comes before, in brackets. */
    const char *name_ends = strrchr(said_of(thread, "stat"), ')');
    return name_ends && !strncmp(name_ends, ") S", 3);
}
/* Returns when a thread has been asleep in ten looks, one after the other. It says its number when it runs. */
static void until_asleep(const volatile pid_t *thread) {
    for (int looks = 0; looks < 10; usleep(10000)) looks = *thread && is_asleep(*thread) ? looks + 1 : 0;
}
