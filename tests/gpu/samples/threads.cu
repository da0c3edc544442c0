// Many threads: each with streams and memory of its own, memory that other threads free, threads that come and go, exceptions. An
// interposer's books, marks of threads and locks are met by all of them at once.
// also ptds: --default-stream per-thread
#include "check.h"
#include <atomic>
#include <future>
#include <mutex>
#include <stdexcept>
static cudaStream_t stream() { cudaStream_t s; CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking)); return s; }
template <class F> static void all(int n, F f) { std::vector<std::thread> t; for (int i = 0; i < n; i++) t.emplace_back(f, i); for (auto &x : t) x.join(); }
static void round_trip(cudaStream_t s, size_t n, uint32_t seed) {
    auto p = device(n); fill<<<64, 256, 0, s>>>(p, n, seed); std::vector<uint32_t> h(n); CHECK(cudaMemcpyAsync(h.data(), p, n * 4, cudaMemcpyDeviceToHost, s));
    CHECK(cudaStreamSynchronize(s)); WANT(!wrong(h.data(), n, seed)); CHECK(cudaFree(p));
}

CASE(sixteen) {
    all(16, [](int t) { auto s = stream(); for (int i = 0; i < 12; i++) round_trip(s, 1 + value(i * 16 + t, 5) % (i % 4 ? 20000 : 2000000), t * 100 + i); CHECK(cudaStreamDestroy(s)); });
}
CASE(launches_of_sixty_four) {
    auto p = device(64 * 256); CHECK(cudaMemset(p, 0, 64 * 1024)); CHECK(cudaDeviceSynchronize());
    all(64, [&](int t) { auto s = stream(); for (int i = 0; i < 500; i++) add<<<1, 256, 0, s>>>(p + t * 256, 256, 1u); CHECK(cudaStreamSynchronize(s)); });
    std::vector<uint32_t> v(64 * 256); CHECK(cudaMemcpy(v.data(), p, v.size() * 4, cudaMemcpyDeviceToHost)); for (auto x : v) WANT(x == 500);
}
CASE(one_stream_for_all) {
    auto s = stream(); auto p = device(MiB); CHECK(cudaMemset(p, 0, 4 * MiB)); CHECK(cudaDeviceSynchronize());
    all(32, [&](int) { for (int i = 0; i < 100; i++) add<<<64, 256, 0, s>>>(p, MiB, 1u); }); CHECK(cudaStreamSynchronize(s)); std::vector<uint32_t> v(MiB);
    CHECK(cudaMemcpy(v.data(), p, 4 * MiB, cudaMemcpyDeviceToHost)); for (auto x : v) WANT(x == 3200);
}
CASE(default_stream_of_each) {
    all(16, [](int t) { for (int i = 0; i < 10; i++) round_trip(0, 100000, t * 10 + i); });
    all(16, [](int t) { for (int i = 0; i < 10; i++) round_trip(cudaStreamPerThread, 100000, t * 10 + i); });
}
CASE(freed_by_another) {
    std::mutex m; std::vector<std::pair<uint32_t *, uint32_t>> left;
    all(16, [&](int t) { for (int i = 0; i < 10; i++) { auto p = device(100000); fill<<<64, 256>>>(p, 100000, t * 10 + i); CHECK(cudaStreamSynchronize(0)); std::lock_guard g(m); left.push_back({p, t * 10 + i}); } });
    WANT(left.size() == 160);
    all(8, [&](int t) { for (size_t i = t; i < 160; i += 8) { WANT(!wrong_on_device(left[i].first, 100000, left[i].second)); CHECK(cudaFree(left[i].first)); } });
}
CASE(come_and_go) {
    for (int i = 0; i < 300; i++) std::thread([i] { auto p = device(20000); fill<<<8, 256>>>(p, 20000, i); if (i % 10 == 0) WANT(!wrong_on_device(p, 20000, i)); CHECK(cudaFree(p)); }).join();
}
CASE(work_left_by_dead_threads) {
    std::vector<uint32_t *> p; std::vector<cudaStream_t> s; for (int i = 0; i < 20; i++) { p.push_back(device(MiB)); s.push_back(stream()); }
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < 20; i++) std::thread([&, i] { spin<<<1, 1, 0, s[i]>>>(3000000); fill<<<64, 256, 0, s[i]>>>(p[i], MiB, i); }).detach(); usleep(100000);
    CHECK(cudaDeviceSynchronize()); for (int i = 0; i < 20; i++) WANT(!wrong_on_device(p[i], MiB, i));
}
CASE(hammer) {
    std::atomic<bool> stop{false}; std::thread looks([&] { size_t a, b; while (!stop) { CHECK(cudaMemGetInfo(&a, &b)); WANT(a <= b); } });
    all(16, [](int t) { std::vector<void *> mine; for (int i = 0; i < 300; i++) { void *p; CHECK(cudaMalloc(&p, 1 + value(i, t) % (3 * MiB))); mine.push_back(p); if (mine.size() > 8) { CHECK(cudaFree(mine[i % 8])); mine[i % 8] = mine.back(); mine.pop_back(); } } for (auto p : mine) CHECK(cudaFree(p)); });
    stop = true; looks.join();
}
CASE(errors_of_each) {
    void *p; SAY(cudaMalloc(&p, ~size_t(0))); std::thread([] { SAY(cudaPeekAtLastError()); SAY(cudaSetDevice(999)); }).join(); SAY(cudaGetLastError());
    SAY(cudaGetLastError());
}
CASE(exceptions) {
    int caught = 0; for (int i = 0; i < 50; i++) try { auto p = device(10000); fill<<<4, 256>>>(p, 10000, i); CHECK(cudaFree(p)); void *q;
    if (cudaMalloc(&q, size_t(1) << 50)) throw std::runtime_error("no memory"); } catch (const std::runtime_error &) { caught++; } cudaGetLastError();
    printf("%d\n", caught); auto f = std::async(std::launch::async, [] { round_trip(cudaStreamPerThread, 1000, 1); throw 5; }); try { f.get(); }
    catch (int v) { printf("%d\n", v); } CHECK(cudaLaunchHostFunc(0, [](void *) { try { throw 7; } catch (int v) { printf("%d\n", v); } }, nullptr));
    CHECK(cudaStreamSynchronize(0));
}
CASE(contexts_of_each) {
    CHECK(cuInit(0));
    all(8, [](int t) { CUcontext c; CHECK(cuCtxCreate(&c, nullptr, 0, 0)); CUdeviceptr p; CHECK(cuMemAlloc(&p, 8 * MiB)); for (int i = 0; i < 5; i++) { CHECK(cuMemsetD32(p, t * 10 + i, 2 * MiB)); std::vector<int> h(2 * MiB); CHECK(cuMemcpyDtoH(h.data(), p, 8 * MiB)); for (auto x : h) WANT(x == t * 10 + i); } CHECK(cuCtxDestroy(c)); });
}
CASE(first_calls_at_once) { std::atomic<int> ready{0}; all(32, [&](int t) { ready++; while (ready < 32); round_trip(cudaStreamPerThread, 5000, t); }); }
CASE(pinned_by_each) {
    all(16, [](int t) { for (int i = 0; i < 10; i++) { uint32_t *h; CHECK(cudaMallocHost(&h, 400000)); auto p = device(100000); fill<<<64, 256>>>(p, 100000, t); CHECK(cudaMemcpy(h, p, 400000, cudaMemcpyDeviceToHost)); WANT(!wrong(h, 100000, t)); CHECK(cudaFreeHost(h)); CHECK(cudaFree(p)); } });
}
CASE(async_of_each) {
    all(16, [](int t) { auto s = stream(); for (int i = 0; i < 50; i++) { uint32_t *p; CHECK(cudaMallocAsync(&p, 400000, s)); fill<<<64, 256, 0, s>>>(p, 100000, t); uint32_t h[100]; CHECK(cudaMemcpyAsync(h, p + 50, 400, cudaMemcpyDeviceToHost, s)); CHECK(cudaFreeAsync(p, s)); CHECK(cudaStreamSynchronize(s)); for (int k = 0; k < 100; k++) WANT(h[k] == value(k + 50, t)); } });
}
