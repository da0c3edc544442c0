// Processes: forks before and after CUDA, exec, exits of every kind with work in flight, signals, children that share the card. An
// interposer's threads, sockets and locks are not inherited as a program's are.
#include "check.h"
#include <csignal>
#include <fcntl.h>
#include <spawn.h>
#include <sys/resource.h>
static void work(uint32_t seed) {
    const size_t n = MiB; auto p = device(n); fill<<<64, 256>>>(p, n, seed); WANT(!wrong_on_device(p, n, seed)); CHECK(cudaFree(p));
}
static void in_flight() { auto p = device(MiB); for (int i = 0; i < 50; i++) { spin<<<1, 1>>>(4000000); fill<<<64, 256>>>(p, MiB, i); } }
template <class F> static pid_t forked(F f) { fflush(stdout); pid_t p = fork(); if (!p) { f(); leave(0); } return p; }
CHILD(worker) { work(stoi(args[0])); }
CHILD(exits) { in_flight(); exit(3); }
CHILD(leaves) { in_flight(); _exit(4); }
CHILD(returns) { in_flight(); }
CHILD(thread_exits) { in_flight(); std::thread([] { exit(5); }).join(); }
CHILD(quick) { in_flight(); quick_exit(6); }
CHILD(aborts) { setrlimit(RLIMIT_CORE, std::initializer_list<rlimit>{{0, 0}}.begin()); in_flight(); abort(); }
CHILD(waits) { in_flight(); puts("ready"); for (;;) pause(); }
CHILD(detached) {
    CHECK(cudaFree(0));
    for (int i = 0; i < 8; i++) std::thread([] { for (;;) { void *p; if (cudaMalloc(&p, MiB)) pause(); cudaMemset(p, 1, MiB); cudaFree(p); } }).detach();
    usleep(200000);
}
static struct Late { uint32_t *p = nullptr; ~Late() { if (p) { auto r = cudaFree(p); if (r && r != cudaErrorCudartUnloading) leave(9); } } } late;
CHILD(destructor) { late.p = device(MiB); fill<<<64, 256>>>(late.p, MiB, 1); }
CHILD(at_exit) { work(1); atexit([] { void *p; auto r = cudaMalloc(&p, MiB); if (r && r != cudaErrorCudartUnloading) leave(9); }); }

CASE(exits) {
    std::vector<std::pair<const char *, pid_t>> all;
    for (auto c : {"exits", "leaves", "returns", "thread_exits", "quick", "aborts", "destructor", "at_exit"}) all.push_back({c, start(c)});
    for (auto [c, pid] : all) printf("%s: %d\n", c, result(pid)); work(1);
}
CASE(threads_at_exit) { printf("%d\n", result(start("detached"))); work(1); }  // main returns while others call
CASE(killed) {
    for (int s : {SIGTERM, SIGKILL, SIGINT}) { int p[2]; WANT(!pipe(p)); fflush(stdout); pid_t c = fork(); if (!c) { dup2(p[1], 1);
    execl("/proc/self/exe", "x", "_waits", nullptr); _exit(99); } close(p[1]); char b[6]; WANT(read(p[0], b, 6) == 6); kill(c, s);
    printf("%d: %d\n", s, result(c)); close(p[0]); } work(2);
}
CASE(fork_before) { auto a = forked([] { work(1); }), b = forked([] { work(2); }); work(3); printf("%d %d\n", result(a), result(b)); }
CASE(fork_after) {
    auto p = device(MiB); fill<<<64, 256>>>(p, MiB, 1); auto c = forked([] { usleep(50000); }); work(2); printf("%d\n", result(c));
    WANT(!wrong_on_device(p, MiB, 1)); for (int i = 0; i < 20; i++) WANT(!result(forked([] {}))); work(3);
}
CASE(child_after) {  // no CUDA in a child of a process that uses it
    work(1); printf("%d\n", result(forked([] { void *p; int n = -1; SAY(cudaMalloc(&p, 4)); SAY(cudaGetDeviceCount(&n)); SAY(cudaDeviceSynchronize()); })));
    work(2);
}
CASE(child_exits_normally) {  // destructors of everything run in the child
    auto p = device(MiB); fill<<<64, 256>>>(p, MiB, 1); fflush(stdout); pid_t c = fork(); if (!c) exit(0); printf("%d\n", result(c));
    WANT(!wrong_on_device(p, MiB, 1)); work(2);
}
CASE(fork_with_work) { in_flight(); auto a = forked([] { usleep(100000); }); in_flight(); printf("%d\n", result(a)); CHECK(cudaDeviceSynchronize()); work(1); }
CASE(vfork_exec) {
    work(1); fflush(stdout); pid_t c = vfork(); if (!c) { execl("/bin/true", "true", nullptr); _exit(99); } printf("%d\n", result(c)); c = vfork();
    if (!c) { execl("/proc/self/exe", "x", "_worker", "5", nullptr); _exit(99); } printf("%d\n", result(c)); work(2);
}
CASE(shell) {
    work(1); printf("%d\n", WEXITSTATUS(system("exit 7"))); auto f = popen("echo heard", "r"); char b[16] = {}; WANT(f && fgets(b, 16, f));
    printf("%s%d\n", b, pclose(f)); work(2);
}
CASE(eight_children) {
    std::vector<pid_t> all; for (int i = 0; i < 8; i++) all.push_back(start("worker", i)); work(9); for (auto p : all) printf("%d", result(p)); puts("");
}
CASE(exec_itself) {
    if (args.empty()) { work(1); in_flight(); fflush(stdout); execl("/proc/self/exe", "x", "exec_itself", "again", nullptr); } work(2); puts(args[0].c_str());
}
CASE(closed_descriptors) {  // as a daemon begins
    for (int fd = 3; fd < 1024; fd++) close(fd); WANT(!chdir("/")); close(0); work(1); work(2);
}
CASE(daemon) {
    fflush(stdout); pid_t c = fork(); if (!c) { setsid(); if (fork()) _exit(0); work(1); _exit(0); } printf("%d\n", result(c)); usleep(500000); work(2);
}
CASE(signals) {
    static volatile sig_atomic_t ticks; struct sigaction a{}; a.sa_handler = [](int) { ticks = ticks + 1; }; WANT(!sigaction(SIGPROF, &a, nullptr)); work(0);
    for (int i = 0; i < 200; i++) { raise(SIGPROF); auto p = device(10000); fill<<<4, 256>>>(p, 10000, i); kill(getpid(), SIGPROF);
    if (i % 20 == 0) WANT(!wrong_on_device(p, 10000, i)); CHECK(cudaFree(p)); } printf("%d\n", ticks >= 200); struct sigaction b;
    for (int s : {SIGPIPE, SIGCHLD, SIGTERM, SIGUSR1, SIGALRM}) { WANT(!sigaction(s, nullptr, &b)); printf("%d", b.sa_handler == SIG_DFL); } sigset_t m;
    WANT(!pthread_sigmask(0, nullptr, &m)); for (int s = 1; s < 32; s++) WANT(!sigismember(&m, s)); puts("");
}
