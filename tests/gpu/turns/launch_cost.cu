// What an eager launch costs the thread that makes it: launch_cost STREAMS [THREADS 1] [CHUNKS 400]. Chunks of 200 launches of an empty kernel on the streams in
// turn, each chunk timed by itself and then waited for. Prints the median and the 10th and 90th percentile of a launch in ns.
#include <cuda_runtime.h>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>
#define C(x) do { cudaError_t e_ = (x); if (e_) { printf("error %s at %s\n", cudaGetErrorString(e_), #x); exit(1); } } while (0)
__global__ void nothing() {}
int main(int c, char **v) {
    int n = c > 1 ? atoi(v[1]) : 1, threads = c > 2 ? atoi(v[2]) : 1, chunks = c > 3 ? atoi(v[3]) : 400;
    std::vector<std::vector<double>> times(threads);
    auto work = [&](int t) {
        std::vector<cudaStream_t> s(n);
        for (auto &x : s) C(cudaStreamCreateWithFlags(&x, cudaStreamNonBlocking));
        for (int chunk = -20; chunk < chunks; chunk++) {
            auto begin = std::chrono::steady_clock::now();
            for (int i = 0; i < 200; i++) nothing<<<1, 1, 0, s[i % n]>>>();
            double ns = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() / 200;
            if (chunk >= 0) times[t].push_back(ns);
            for (auto &x : s) C(cudaStreamSynchronize(x));
        }
    };
    C(cudaFree(0));
    std::vector<std::thread> all;
    for (int t = 0; t < threads; t++) all.emplace_back(work, t);
    for (auto &x : all) x.join();
    std::vector<double> ns;
    for (auto &t : times) ns.insert(ns.end(), t.begin(), t.end());
    std::sort(ns.begin(), ns.end());
    printf("{\"ns\": %.1f, \"p10\": %.1f, \"p90\": %.1f}\n", ns[ns.size() / 2], ns[ns.size() / 10], ns[ns.size() * 9 / 10]);
}
