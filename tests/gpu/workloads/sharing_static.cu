// CUDA IPC by the runtime, which is linked statically; sharing.py builds and strips it. Arguments and the line of JSON are as sharing_job.py's.
// In each round the parent fills a new allocation, a child opens it, counts wrong words, changes it and closes it, and the parent counts again.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>
#include <cuda_runtime.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(call) do { cudaError_t e = (call); if (e != cudaSuccess) { fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(e)); exit(1); } } while (0)
typedef unsigned long long u64;

#define EACH(i, n) for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x)
__global__ void fill(unsigned *p, u64 n, unsigned seed) { EACH(i, n) p[i] = (unsigned)i * 7 + seed; }
__global__ void add(unsigned *p, u64 n) { EACH(i, n) p[i] += 1; }
__global__ void look(const unsigned *p, u64 n, unsigned seed, u64 *wrong) { EACH(i, n) if (p[i] != (unsigned)i * 7 + seed) atomicAdd(wrong, 1ull); }

struct Told { cudaIpcMemHandle_t handle; u64 words; unsigned seed, again; };
struct Said { u64 wrong; int opened, closed; };

static u64 *counter;

static u64 wrong_words(const unsigned *p, u64 n, unsigned seed) {
    u64 wrong = 0;
    CHECK(cudaMemset(counter, 0, sizeof wrong));
    look<<<512, 256>>>(p, n, seed, counter);
    CHECK(cudaMemcpy(&wrong, counter, sizeof wrong, cudaMemcpyDeviceToHost));
    return wrong;
}

// Memory that is not shared, in blocks of 64 MiB.
struct Ballast {
    static const u64 words = 16 << 20;
    std::vector<unsigned *> blocks;
    unsigned added = 0;
    explicit Ballast(double gib) : blocks((size_t)(gib * 16)) {
        CHECK(cudaMalloc(&counter, sizeof *counter));
        for (size_t i = 0; i < blocks.size(); i++) { CHECK(cudaMalloc(&blocks[i], words * 4)); fill<<<512, 256>>>(blocks[i], words, (unsigned)i); }
        CHECK(cudaDeviceSynchronize());
    }
    void change() { for (unsigned *p : blocks) add<<<512, 256>>>(p, words); CHECK(cudaDeviceSynchronize()); added++; }
    u64 wrong() { u64 sum = 0; for (size_t i = 0; i < blocks.size(); i++) sum += wrong_words(blocks[i], words, (unsigned)i + added); return sum; }
};

static bool get(int fd, void *to, size_t n) {
    for (char *p = (char *)to; n;) { ssize_t r = read(fd, p, n); if (r <= 0) return false; p += r; n -= r; }
    return true;
}
static void put(int fd, const void *from, size_t n) { if (write(fd, from, n) != (ssize_t)n) { perror("write"); exit(1); } }

static int child(int in, int out, double gib) {
    Ballast ballast(gib);
    u64 ready = 1;
    put(out, &ready, sizeof ready);
    Told told;
    while (get(in, &told, sizeof told) && told.again) {
        void *p = nullptr;
        Said said = {0, (int)cudaIpcOpenMemHandle(&p, told.handle, cudaIpcMemLazyEnablePeerAccess), 0};
        if (!said.opened) {
            said.wrong = wrong_words((unsigned *)p, told.words, told.seed);
            add<<<512, 256>>>((unsigned *)p, told.words);
            CHECK(cudaDeviceSynchronize());
            said.closed = cudaIpcCloseMemHandle(p);
        }
        put(out, &said, sizeof said);
        ballast.change();
    }
    u64 wrong = ballast.wrong();
    put(out, &wrong, sizeof wrong);
    return 0;
}

static double now() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec / 1e9; }

int main(int count, char **arguments) {
    double seconds = 2, gib = 1.25;
    int least = 2;
    std::string stop;
    for (int i = 2; i + 1 < count; i += 2) {
        std::string name = arguments[i];
        if (name == "--seconds") seconds = atof(arguments[i + 1]);
        if (name == "--least") least = atoi(arguments[i + 1]);
        if (name == "--stop") stop = arguments[i + 1];
        if (name == "--gib") gib = atof(arguments[i + 1]);
    }
    int there[2], back[2];
    if (pipe(there) || pipe(back)) return 1;
    pid_t pid = fork();
    alarm(150);
    if (!pid) { close(there[1]); close(back[0]); exit(child(there[0], back[1], gib)); }
    close(there[0]);
    close(back[1]);
    Ballast ballast(gib);
    u64 ready = 0, wrong_there = 0, wrong_back = 0, refused = 0, other = ~0ull;
    if (!get(back[0], &ready, sizeof ready)) return 1;
    double begun = now();
    int n = 0;
    for (; n < least || (now() - begun < seconds && (stop.empty() || access(stop.c_str(), F_OK))); n++) {
        Told told = {{}, 1ull << (14 + n % 8), (unsigned)n * 3, 1};  // 64 KiB to 8 MiB
        unsigned *p;
        CHECK(cudaMalloc(&p, told.words * 4));
        fill<<<512, 256>>>(p, told.words, told.seed);
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaIpcGetMemHandle(&told.handle, p));
        put(there[1], &told, sizeof told);
        Said said;
        if (!get(back[0], &said, sizeof said)) return 1;
        refused += said.opened || said.closed;
        wrong_there += said.wrong;
        wrong_back += wrong_words(p, told.words, told.seed + 1);
        CHECK(cudaFree(p));
        ballast.change();
    }
    Told end = {};
    put(there[1], &end, sizeof end);
    get(back[0], &other, sizeof other);
    int status = -1;
    waitpid(pid, &status, 0);
    printf("{\"answers\": {\"opened or closed with an error\": %llu, \"words that are wrong\": [%llu, %llu], ", refused, wrong_there, wrong_back);
    printf("\"other memory, wrong words\": [%llu, %llu], \"the child ends\": %d}, \"counts\": {\"rounds\": %d}}\n", ballast.wrong(), other, status, n);
    return 0;
}
