// Two processes exchange working sets: one takes 4 GiB off the card while the other brings 4 GiB there, in chunks of a size, with mapping on the
// thread that copies or on another one. And how long a 4-byte read of a program waits behind copies of ours.
// c++ -std=c++17 -O2 -pthread -I $CUDA/include -o exchange_probe exchange_probe.cpp -lcuda
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include "swap_probe.h"

static const size_t SET = 4 * GIB; static const size_t SIZES[] = {2 * MIB, 20 * MIB, 128 * MIB}; static const int ROUNDS = 6;
struct Shared { std::atomic<int> at[256]; double took[256][2]; std::atomic<int> wrong; };
static Shared *shared;
static void meet(int where) { shared->at[where]++; while (shared->at[where] < 2) usleep(20); }

struct Set {
  Card card; char *host; CUdeviceptr va; size_t size, count; std::vector<CUmemGenericAllocationHandle> handles; CUstream copies; std::vector<CUevent> events;
  Set() { D(cuMemHostAlloc((void **)&host, SET, 0)); D(cuMemAddressReserve(&va, SET, 0, 0, 0)); D(cuStreamCreate(&copies, CU_STREAM_NON_BLOCKING)); events.resize(SET / (2 * MIB)); for (auto &e : events) D(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING)); }
  void use(size_t s) { size = s; count = SET / s; handles.assign(count, 0); }
  void create(size_t i) { CUmemAllocationProp p = on_card(); D(cuMemCreate(&handles[i], size, &p, 0)); D(cuMemMap(va + i * size, size, 0, handles[i], 0)); }
  void access(size_t i, size_t n) { CUmemAccessDesc a = read_write(); D(cuMemSetAccess(va + i * size, n * size, &a, 1)); }
  void release(size_t i) { D(cuMemUnmap(va + i * size, size)); D(cuMemRelease(handles[i])); }
  static const size_t DEPTH = 16; // copies that are under way at most
  void out(bool beside) {
    std::atomic<size_t> submitted{0}; auto unmaps = [&] { for (size_t i = 0; i < count; i++) { while (submitted <= i) std::this_thread::yield(); D(cuEventSynchronize(events[i])); release(i); } };
    std::thread t; if (beside) t = std::thread([&] { D(cuCtxSetCurrent(card.context)); unmaps(); });
    size_t done = 0; for (size_t i = 0; i < count; i++) { D(cuMemcpyDtoHAsync(host + i * size, va + i * size, size, copies)); D(cuEventRecord(events[i], copies)); submitted = i + 1; if (!beside && i >= DEPTH) { D(cuEventSynchronize(events[done])); release(done++); } }
    if (beside) t.join(); else for (; done < count; done++) { D(cuEventSynchronize(events[done])); release(done); }
  }
  void in(bool beside) {
    std::atomic<size_t> mapped{0}; const size_t group = std::max<size_t>(1, 32 * MIB / size); auto maps = [&] { for (size_t i = 0; i < count; i += group) { size_t n = std::min(group, count - i); for (size_t j = 0; j < n; j++) create(i + j); access(i, n); mapped = i + n; if (!beside) for (size_t j = 0; j < n; j++) D(cuMemcpyHtoDAsync(va + (i + j) * size, host + (i + j) * size, size, copies)); } };
    std::thread t; if (beside) t = std::thread([&] { D(cuCtxSetCurrent(card.context)); maps(); }); else maps();
    if (beside) { for (size_t i = 0; i < count; i++) { while (mapped <= i) std::this_thread::yield(); D(cuMemcpyHtoDAsync(va + i * size, host + i * size, size, copies)); } t.join(); }
    D(cuStreamSynchronize(copies));
  }
};

static void worker(int me) {
  Set s; int at = 0; meet(at++);
  for (size_t size : SIZES) for (int beside = 0; beside < 2; beside++) {
    s.use(size); bool resident = me == 0; if (resident) { for (size_t i = 0; i < s.count; i++) s.create(i); s.access(0, s.count); D(cuMemsetD32(s.va, me * 1000, s.count * size / 4)); D(cuCtxSynchronize()); } else for (size_t i = 0; i < SET; i += 4096) *(unsigned *)(s.host + i) = me * 1000;
    double best = 0;
    for (int r = 0; r < ROUNDS; r++) {
      meet(at); double t = now(); if (resident) s.out(beside); else s.in(beside); shared->took[at][me] = now() - t; meet(at + 1);
      if (r) best = std::max(best, 2.0 * s.count * size / std::max(shared->took[at][0], shared->took[at][1]) / GIB);
      at += 2; resident = !resident;
    }
    if (me == 0) { printf("%4zu x %3zu MiB, mapping on %s thread: best of %d exchanges %.1f GiB/s in sum\n", s.count, size / MIB, beside ? "another" : "the same", ROUNDS - 1, best); fflush(stdout); }
    if (resident) { unsigned v = 0; D(cuMemcpyDtoH(&v, s.va + s.count * size - 4096, 4)); if (v != (unsigned)me * 1000) { shared->wrong++; printf("WRONG: %u for %u\n", v, me * 1000); } for (size_t i = 0; i < s.count; i++) s.release(i); }
  }
}

static void latency() {
  Card card; char *host; CUdeviceptr d, small; unsigned *word; D(cuMemHostAlloc((void **)&host, 512 * MIB, 0)); D(cuMemHostAlloc((void **)&word, 4096, 0)); D(cuMemAlloc(&d, 512 * MIB)); D(cuMemAlloc(&small, 4096)); std::atomic<bool> stop{false};
  CUstream mine; D(cuStreamCreate(&mine, CU_STREAM_NON_BLOCKING));
  for (int way = 0; way < 3; way++) for (size_t piece : {size_t(0), 2 * MIB, 16 * MIB, 128 * MIB}) {
    if ((way == 0) != (piece == 0)) continue;
    stop = false; std::thread t([&] { D(cuCtxSetCurrent(card.context)); while (piece && !stop) { for (size_t o = 0; o < 512 * MIB; o += piece) { if (way == 1) D(cuMemcpyDtoHAsync(host + o, d + o, piece, card.stream)); else D(cuMemcpyHtoDAsync(d + o, host + o, piece, card.stream)); } D(cuStreamSynchronize(card.stream)); } });
    std::vector<double> out, in; double end = now() + 0.4; while (now() < end) { double q = now(); D(cuMemcpyDtoHAsync(word, small, 4, mine)); D(cuStreamSynchronize(mine)); out.push_back(now() - q); q = now(); D(cuMemcpyHtoDAsync(small, word, 4, mine)); D(cuStreamSynchronize(mine)); in.push_back(now() - q); } stop = true; t.join(); std::sort(out.begin(), out.end()); std::sort(in.begin(), in.end());
    printf("4 bytes beside %s of %3zu MiB: read median %.3f worst %.3f ms, write median %.3f worst %.3f ms\n", way == 0 ? "nothing" : way == 1 ? "evictions" : "restores", piece / MIB, out[out.size() / 2] * 1e3, out.back() * 1e3, in[in.size() / 2] * 1e3, in.back() * 1e3); fflush(stdout);
  }
}

template <class F> static pid_t process(F f) { fflush(stdout); pid_t pid = fork(); if (!pid) { alarm(18); f(); fflush(stdout); _exit(0); } return pid; }
int main() {
  setvbuf(stdout, nullptr, _IOLBF, 0); alarm(25); int status; waitpid(process(latency), &status, 0); if (status) printf("latency ended with %#x\n", status);
  shared = (Shared *)mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0); pid_t a = process([] { worker(0); }), b = process([] { worker(1); }); waitpid(a, &status, 0); printf("%#x ", status); waitpid(b, &status, 0); printf("%#x, %d wrong\n", status, shared->wrong.load());
}
