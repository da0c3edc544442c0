// What every sample shares: cases by name, checks that say what went wrong, patterns that show whose data it is, children.
// A program runs the case that its first argument names; without one it lists its cases. Nothing that differs from run to
// run is printed: the runner compares what a case prints natively and under nvshare.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

inline std::vector<std::string> args;  // those after the case's name
inline constexpr size_t KiB = 1 << 10, MiB = 1 << 20, GiB = 1 << 30;

inline const char *said(cudaError_t e) { return cudaGetErrorName(e); }
inline const char *said(CUresult e) { const char *s = "?"; cuGetErrorName(e, &s); return s; }
[[noreturn]] inline void leave(int code) { fflush(stdout); _exit(code); }
[[noreturn]] inline void fail(int line, const char *what, const char *why) { printf("line %d: %s: %s\n", line, what, why); leave(1); }
[[noreturn]] inline void skip(const char *why) { printf("skipped: %s\n", why); leave(0); }
template <class E> void check(E e, int line, const char *what) { if (int(e)) fail(line, what, said(e)); }
#define CHECK(call) check(call, __LINE__, #call)
#define WANT(condition) do { if (!(condition)) fail(__LINE__, #condition, "not so"); } while (0)
#define SAY(call) printf("%s: %s\n", #call, said(call))  // whatever it answers, nvshare has to answer the same

struct Case {
    static inline std::vector<Case *> all;
    const char *name; void (*run)();
    Case(const char *name, void (*run)()) : name(name), run(run) { all.push_back(this); }
};
#define CASE(n) static void case_##n(); static Case entry_##n(#n, case_##n); static void case_##n()
#define CHILD(n) static void child_##n(); static Case centry_##n("_" #n, child_##n); static void child_##n()  // not listed, and silent

int main(int argc, char **argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    for (int i = 2; i < argc; i++) args.push_back(argv[i]);
    for (auto c : Case::all)
        if (argc < 2 && c->name[0] != '_') puts(c->name);
        else if (argc >= 2 && !strcmp(c->name, argv[1])) { c->run(); if (c->name[0] != '_') puts("ok"); return 0; }
    if (argc >= 2) printf("no case %s\n", argv[1]);
    return argc >= 2;
}

__host__ __device__ inline uint32_t value(size_t i, uint32_t seed) { return uint32_t(i) * 2654435761u ^ seed * 40503u; }
template <class T> __global__ void fill(T *p, size_t n, uint32_t seed) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) p[i] = T(value(i, seed));
}
template <class T> __global__ void add(T *p, size_t n, T what) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) p[i] += what;
}
template <class T> __global__ void count(const T *p, size_t n, uint32_t seed, unsigned *wrong) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) if (p[i] != T(value(i, seed))) atomicAdd(wrong, 1);
}
template <int = 0> __global__ void spin(unsigned long long ns) {
    unsigned long long a, b; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(a)); do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(b)); while (b - a < ns);
}
template <int = 0> __global__ void await(volatile int *flag) { while (!*flag); }
template <class T> void fill_host(T *p, size_t n, uint32_t seed) { for (size_t i = 0; i < n; i++) p[i] = T(value(i, seed)); }
template <class T> std::vector<T> pattern(size_t n, uint32_t seed) { std::vector<T> v(n); fill_host(v.data(), n, seed); return v; }
template <class T> size_t wrong(const T *p, size_t n, uint32_t seed) { size_t w = 0; for (size_t i = 0; i < n; i++) w += p[i] != T(value(i, seed)); return w; }
template <class T> size_t wrong_on_device(const T *p, size_t n, uint32_t seed) {
    std::vector<T> v(n); CHECK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost)); return wrong(v.data(), n, seed);
}
inline int grid(size_t n) { return int(n < 1 << 20 ? (n + 255) / 256 : 4096); }
template <class T = uint32_t> T *device(size_t n) { T *p; CHECK(cudaMalloc(&p, n * sizeof(T))); return p; }

extern char **environ;
template <class... A> pid_t start(const char *child, A... a) {  // this program once more, at CHILD(child)
    std::vector<std::string> words{"/proc/self/exe", std::string("_") + child, std::to_string(a)...};
    std::vector<char *> argv; for (auto &w : words) argv.push_back(w.data());
    argv.push_back(nullptr); pid_t pid;
    WANT(!posix_spawn(&pid, "/proc/self/exe", nullptr, nullptr, argv.data(), environ));
    return pid;
}
inline int result(pid_t pid) { int s = 0; WANT(waitpid(pid, &s, 0) == pid); return WIFEXITED(s) ? WEXITSTATUS(s) : 128 + WTERMSIG(s); }
inline void send_descriptor(int socket, int fd) {
    char byte = 0, control[CMSG_SPACE(sizeof fd)] = {}; iovec io{&byte, 1}; msghdr m{}; m.msg_iov = &io; m.msg_iovlen = 1; m.msg_control = control;
    m.msg_controllen = sizeof control;
    auto c = CMSG_FIRSTHDR(&m); c->cmsg_level = SOL_SOCKET; c->cmsg_type = SCM_RIGHTS; c->cmsg_len = CMSG_LEN(sizeof fd); memcpy(CMSG_DATA(c), &fd, sizeof fd);
    WANT(sendmsg(socket, &m, 0) == 1);
}
inline int receive_descriptor(int socket) {
    char byte, control[CMSG_SPACE(sizeof(int))]; iovec io{&byte, 1}; msghdr m{}; m.msg_iov = &io; m.msg_iovlen = 1; m.msg_control = control;
    m.msg_controllen = sizeof control;
    WANT(recvmsg(socket, &m, 0) == 1 && CMSG_FIRSTHDR(&m)); int fd; memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd); return fd;
}
template <class T> void put(int fd, const T &v) { WANT(write(fd, &v, sizeof v) == ssize_t(sizeof v)); }
template <class T> T get(int fd) { T v; WANT(read(fd, &v, sizeof v) == ssize_t(sizeof v)); return v; }
