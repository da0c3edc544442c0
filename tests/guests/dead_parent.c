/* A process says what is in the file REGISTER to the socket NVSHARE_SOCKET, and ends as soon as the file GO is there. Its child
   has the connection then, and goes on to say what is in the file TALK, until STOP. */
#include "guest.h"
#include <sys/socket.h>
#include <sys/un.h>
static size_t read_file(const char *name, char *buffer, size_t most) {
    FILE *file = fopen(getenv(name), "rb");
    EXPECT(file);
    size_t length = fread(buffer, 1, most, file);
    fclose(file);
    return length;
}
int main(void) {
    static char registers[4096], talk[4096], ignored[4096];
    size_t first = read_file("REGISTER", registers, sizeof registers), more = read_file("TALK", talk, sizeof talk);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strncpy(address.sun_path, getenv("NVSHARE_SOCKET"), sizeof address.sun_path - 1);
    int connection = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK(connect(connection, (struct sockaddr *)&address, sizeof address));
    EXPECT(write(connection, registers, first) == (ssize_t)first);
    signal(SIGPIPE, SIG_IGN);
    if (fork() == 0) {
        while (goes_on() && send(connection, talk, more, MSG_NOSIGNAL) == (ssize_t)more) {
            while (recv(connection, ignored, sizeof ignored, MSG_DONTWAIT) > 0) { }
            usleep(1000);
        }
        _exit(0);
    }
    while (access(getenv("GO"), F_OK) != 0) usleep(1000);
    _exit(0);
}
