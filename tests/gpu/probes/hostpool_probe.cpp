// Memory of the host for evicted chunks: ordinary pages of a memfd that one process touches and another, not root, registers; and what a process
// can pin by itself. Does registering hold up a kernel loop of another process? At most 6 GiB of the host's and 1 GiB of the card's memory.
// c++ -std=c++17 -O2 -pthread -I $CUDA/include -o hostpool_probe hostpool_probe.cpp -lcuda
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>
#include "swap_probe.h"

static const size_t SEGMENT = 512 * MIB; static const int SEGMENTS = 4;
struct Shared { std::atomic<int> phase, ready, stop; };
static Shared *shared;

static double touch(char *at, size_t bytes, int threads) { double t = now(); std::vector<std::thread> all; for (int i = 0; i < threads; i++) all.emplace_back([=] { for (size_t o = i * (bytes / threads); o < (i + 1) * (bytes / threads); o += 4096) at[o] = 1; }); for (auto &x : all) x.join(); return now() - t; }
static double populate(char *at, size_t bytes, int threads) { double t = now(); std::vector<std::thread> all; for (int i = 0; i < threads; i++) all.emplace_back([=] { madvise(at + i * (bytes / threads), bytes / threads, 23 /* MADV_POPULATE_WRITE */); }); for (auto &x : all) x.join(); return now() - t; }
static std::string gibs(size_t bytes, double s) { char b[32]; snprintf(b, sizeof b, "%.1f GiB/s", bytes / s / GIB); return b; }

// A process that launches a short kernel and waits for it, over and over; says the worst wait of each phase.
static void looper() {
  Card card; int phase = -1; std::vector<double> waits; shared->ready++;
  auto flush = [&] { if (phase >= 0 && !waits.empty()) { std::sort(waits.begin(), waits.end()); printf("  kernel loop, phase %d (%s): %zu rounds, median %.1f, 99%% %.1f, worst %.1f us\n", phase, phase == 0 ? "alone" : phase == 1 ? "register" : phase == 2 ? "copies" : phase == 3 ? "unregister" : "cuMemHostAlloc", waits.size(), waits[waits.size() / 2] * 1e6, waits[waits.size() * 99 / 100] * 1e6, waits.back() * 1e6); fflush(stdout); } waits.clear(); };
  while (!shared->stop) { int p = shared->phase; if (p != phase) { flush(); phase = p; } double t = now(); D(card.run_spin(20000, card.stream)); D(cuStreamSynchronize(card.stream)); waits.push_back(now() - t); }
  flush();
}

static void registers(int fd) {
  if (setgid(65534) || setuid(65534)) printf("  cannot become another user\n");
  rlimit l = {65536, 65536}; setrlimit(RLIMIT_MEMLOCK, &l); Card card; char *at[SEGMENTS]; for (int i = 0; i < SEGMENTS; i++) at[i] = (char *)mmap(nullptr, SEGMENT, PROT_READ | PROT_WRITE, MAP_SHARED, fd, i * SEGMENT);
  CUdeviceptr d; D(cuMemAlloc(&d, SEGMENT)); D(cuMemsetD8(d, 3, SEGMENT)); D(cuCtxSynchronize()); usleep(300000); shared->phase = 1;
  for (int i = 0; i < SEGMENTS; i++) { double t = now(); CUresult r = cuMemHostRegister(at[i], SEGMENT, 0); printf("register 512 MiB of a memfd, uid %d, memlock 64 KiB: %s %.3f s, %s\n", getuid(), name(r).c_str(), now() - t, gibs(SEGMENT, now() - t).c_str()); if (r) return; }
  shared->phase = 2; for (int k = 0; k < 2; k++) { double t = now(); for (auto x : at) D(cuMemcpyDtoHAsync(x, d, SEGMENT, card.stream)); D(cuStreamSynchronize(card.stream)); double out = now() - t; t = now(); for (auto x : at) D(cuMemcpyHtoDAsync(d, x, SEGMENT, card.stream)); D(cuStreamSynchronize(card.stream)); printf("copies: out %s, in %s; data %s\n", gibs(SEGMENTS * SEGMENT, out).c_str(), gibs(SEGMENTS * SEGMENT, now() - t).c_str(), at[3][12345] == 3 ? "right" : "WRONG"); }
  shared->phase = 3; for (int i = 0; i < SEGMENTS - 1; i++) { double t = now(); CUresult r = cuMemHostUnregister(at[i]); printf("unregister: %s %.3f s\n", name(r).c_str(), now() - t); }
  // The last one is registered while its context ends.
  D(cuMemFree(d)); CUresult reset = cuDevicePrimaryCtxReset(0); printf("context reset with a segment registered: %s", name(reset).c_str()); CUcontext c; D(cuDevicePrimaryCtxRetain(&c, 0)); D(cuCtxSetCurrent(c)); unsigned f; CUresult r = cuMemHostGetFlags(&f, at[3]); printf("; its flags then: %s", name(r).c_str()); r = cuMemHostRegister(at[3], SEGMENT, 0); printf("; registered again: %s\n", name(r).c_str());
  shared->phase = 4; double t = now(); void *p; r = cuMemHostAlloc(&p, SEGMENT, 0); printf("cuMemHostAlloc of 512 MiB: %s %s\n", name(r).c_str(), gibs(SEGMENT, now() - t).c_str());
}

// What one process can pin by itself, and whether copies to it are at full rate.
static void by_itself() {
  Card card; CUdeviceptr d; D(cuMemAlloc(&d, GIB));
  for (int huge = 0; huge < 2; huge++) for (int threads : {1, 4, 8}) for (int call = 0; call < 2; call++) {
    char *raw = (char *)mmap(nullptr, GIB + 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *at = (char *)(((size_t)raw + 2 * MIB - 1) & ~(2 * MIB - 1)); if (huge) madvise(at, GIB, MADV_HUGEPAGE);
    double a = call ? populate(at, GIB, threads) : touch(at, GIB, threads), t = now(); CUresult r = cuMemHostRegister(at, GIB, 0); double b = now() - t; t = now(); D(cuMemcpyDtoHAsync(at, d, GIB, card.stream)); D(cuStreamSynchronize(card.stream)); double c = now() - t; t = now(); if (!r) cuMemHostUnregister(at); double e = now() - t;
    printf("anonymous%s, %d threads %s: %s; register %s %s; copy out %s; unregister %.3f s\n", huge ? ", huge" : "", threads, call ? "MADV_POPULATE_WRITE" : "touch", gibs(GIB, a).c_str(), name(r).c_str(), gibs(GIB, b).c_str(), gibs(GIB, c).c_str(), e); munmap(raw, GIB + 2 * MIB); fflush(stdout);
  }
  { double t = now(); std::vector<std::thread> all; for (int i = 0; i < 4; i++) all.emplace_back([&] { D(cuCtxSetCurrent(card.context)); void *p; D(cuMemHostAlloc(&p, 256 * MIB, 0)); D(cuMemFreeHost(p)); }); for (auto &x : all) x.join(); printf("cuMemHostAlloc of 256 MiB by 4 threads at once, freed again: %s\n", gibs(GIB, now() - t).c_str()); }
}

template <class F> static pid_t process(F f) { fflush(stdout); pid_t pid = fork(); if (!pid) { setvbuf(stdout, nullptr, _IOLBF, 0); alarm(22); f(); fflush(stdout); _exit(0); } return pid; }

int main() {
  setvbuf(stdout, nullptr, _IOLBF, 0); alarm(25); shared = (Shared *)mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0); FILE *thp = fopen("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "r"); char line[80] = ""; if (thp && fgets(line, sizeof line, thp)) printf("shmem_enabled: %s", line);
  int fd = memfd_create("probe", MFD_ALLOW_SEALING); if (ftruncate(fd, SEGMENT * SEGMENTS)) return 1;
  const int threads[] = {1, 4, 8, 8};
  for (int i = 0; i < SEGMENTS; i++) { char *at = (char *)mmap(nullptr, SEGMENT, PROT_READ | PROT_WRITE, MAP_SHARED, fd, i * SEGMENT); double t = i == 3 ? populate(at, SEGMENT, threads[i]) : touch(at, SEGMENT, threads[i]); printf("memfd, %s by %d threads: %s\n", i == 3 ? "MADV_POPULATE_WRITE" : "touched", threads[i], gibs(SEGMENT, t).c_str()); munmap(at, SEGMENT); }
  int status; pid_t loop = process(looper); while (!shared->ready) { usleep(1000); if (waitpid(loop, &status, WNOHANG) == loop) { printf("kernel loop ended with %#x\n", status); return 1; } }
  pid_t reg = process([=] { registers(fd); }); waitpid(reg, &status, 0); if (status) printf("registering process ended with %#x\n", status); shared->stop = 1; waitpid(loop, &status, 0); close(fd);
  waitpid(process(by_itself), &status, 0); printf("done %#x\n", status);
}
