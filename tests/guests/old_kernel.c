/* A kernel before Linux 6.5, in front of a process that does not see the numbers of others: preloaded into the scheduler. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

int getsockopt(int socket, int level, int name, void *value, socklen_t *length) {
    if (level == SOL_SOCKET && name == 77 /* SO_PEERPIDFD */) {
        errno = ENOPROTOOPT;
        return -1;
    }
    int result = syscall(SYS_getsockopt, socket, level, name, value, length);
    if (result == 0 && level == SOL_SOCKET && name == SO_PEERCRED) ((struct ucred *)value)->pid = 0;
    return result;
}
