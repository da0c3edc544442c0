// Allocate, launch, copy back, free: vectorAdd and its kin, and what cudaMalloc has to answer for every size. An interposer that
// hands out other memory shows in alignment, in zero bytes, in what does not fit, and in what is free before and after.
// also ptds: --default-stream per-thread
// also shared: -cudart shared
#include "check.h"

__global__ void vector_sum(const float *a, const float *b, float *c, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) c[i] = a[i] + b[i]; }
__global__ void product(const float *a, const float *b, float *c, int n) {
    __shared__ float x[16][16], y[16][16]; float sum = 0; int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
    for (int k = 0; k < n; k += 16) {
        x[threadIdx.y][threadIdx.x] = a[row * n + k + threadIdx.x]; y[threadIdx.y][threadIdx.x] = b[(k + threadIdx.y) * n + column]; __syncthreads();
        for (int j = 0; j < 16; j++) sum += x[threadIdx.y][j] * y[j][threadIdx.x];
        __syncthreads();
    }
    c[row * n + column] = sum;
}
__global__ void histogram(const uint8_t *p, size_t n, unsigned *bins) {
    __shared__ unsigned mine[256]; mine[threadIdx.x] = 0; __syncthreads();
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) atomicAdd(&mine[p[i]], 1);
    __syncthreads(); atomicAdd(&bins[threadIdx.x], mine[threadIdx.x]);
}

CASE(vector_add) {
    const int n = 50000; std::vector<float> a(n), b(n), c(n); for (int i = 0; i < n; i++) a[i] = i, b[i] = 2 * i;
    float *x = device<float>(n), *y = device<float>(n), *z = device<float>(n);
    CHECK(cudaMemcpy(x, a.data(), n * 4, cudaMemcpyHostToDevice)); CHECK(cudaMemcpy(y, b.data(), n * 4, cudaMemcpyHostToDevice));
    vector_sum<<<grid(n), 256>>>(x, y, z, n); CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(c.data(), z, n * 4, cudaMemcpyDeviceToHost)); for (int i = 0; i < n; i++) WANT(c[i] == 3.f * i);
    CHECK(cudaFree(x)); CHECK(cudaFree(y)); CHECK(cudaFree(z));
}
CASE(matrix_multiply) {
    const int n = 512; std::vector<float> a(n * n, 1), b(n * n, 0.01f), c(n * n);
    float *x = device<float>(n * n), *y = device<float>(n * n), *z = device<float>(n * n);
    CHECK(cudaMemcpy(x, a.data(), n * n * 4, cudaMemcpyHostToDevice)); CHECK(cudaMemcpy(y, b.data(), n * n * 4, cudaMemcpyHostToDevice));
    for (int i = 0; i < 100; i++) product<<<dim3(n / 16, n / 16), dim3(16, 16)>>>(x, y, z, n);
    CHECK(cudaDeviceSynchronize()); CHECK(cudaMemcpy(c.data(), z, n * n * 4, cudaMemcpyDeviceToHost)); for (float v : c) WANT(v > 5.119f && v < 5.121f);
}
CASE(histogram) {
    const size_t n = 64 * MiB; auto p = device<uint8_t>(n); auto bins = device<unsigned>(256); unsigned seen[256], sum = 0; std::vector<unsigned> want(256);
    CHECK(cudaMemset(bins, 0, 1024)); fill<<<grid(n), 256>>>(p, n, 1); histogram<<<1024, 256>>>(p, n, bins);
    CHECK(cudaMemcpy(seen, bins, 1024, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < n; i++) want[uint8_t(value(i, 1))]++;
    for (int i = 0; i < 256; i++) { sum += seen[i]; WANT(seen[i] == want[i]); }
    WANT(sum == n);
}
CASE(sizes) {  // every one aligned and whole, also those just above and below what an allocator rounds to
    std::vector<std::pair<uint8_t *, size_t>> all; uint32_t seed = 0;
    for (size_t base : {size_t(1), 256 * size_t(1), 4 * KiB, 64 * KiB, MiB, 2 * MiB, 32 * MiB})
        for (int odd : {-1, 0, 1, 7}) { size_t n = base + odd; if (!n) continue; auto p = device<uint8_t>(n); WANT(uintptr_t(p) % 256 == 0);
        fill<<<grid(n), 256>>>(p, n, ++seed); all.push_back({p, n}); }
    seed = 0; for (auto [p, n] : all) WANT(!wrong_on_device(p, n, ++seed));
    for (auto [p, n] : all) CHECK(cudaFree(p));
}
CASE(zero_bytes) {
    void *p = &p; CHECK(cudaMalloc(&p, 0)); printf("null: %d\n", p == nullptr); CHECK(cudaFree(p)); CHECK(cudaFree(nullptr));
    size_t pitch = 1; SAY(cudaMallocPitch(&p, &pitch, 0, 5)); printf("null: %d pitch %zu\n", p == nullptr, pitch); SAY(cudaMallocManaged(&p, 0));
    SAY(cudaMallocHost(&p, 0)); SAY(cudaGetLastError());
}
CASE(larger_than_card) {  // out of memory, said and forgotten: the program goes on
    void *p = nullptr; size_t free, total; CHECK(cudaMemGetInfo(&free, &total));
    SAY(cudaMalloc(&p, total + GiB)); SAY(cudaGetLastError()); SAY(cudaGetLastError());
    SAY(cudaMalloc(&p, size_t(1) << 44)); SAY(cudaMalloc(&p, ~size_t(0))); SAY(cudaMalloc(&p, ~size_t(0) - 100)); SAY(cudaPeekAtLastError());
    SAY(cudaGetLastError());
    size_t pitch; SAY(cudaMallocPitch(&p, &pitch, size_t(1) << 30, size_t(1) << 20)); cudaPitchedPtr three;
    SAY(cudaMalloc3D(&three, make_cudaExtent(1 << 20, 1 << 20, 1 << 10))); cudaGetLastError();
    auto q = device(1000); fill<<<4, 256>>>(q, 1000, 3); WANT(!wrong_on_device(q, 1000, 3));
}
CASE(memory_info) {  // alone on the card: what was free comes back
    size_t before, during, after, total, total2; cudaFree(0); auto warm = device(MiB); cudaFree(warm); CHECK(cudaMemGetInfo(&before, &total));
    auto p = device<char>(512 * MiB); CHECK(cudaMemGetInfo(&during, &total2)); WANT(total == total2 && before <= total && during <= before);
    WANT(before - during >= 512 * MiB && before - during <= 520 * MiB); CHECK(cudaFree(p)); CHECK(cudaMemGetInfo(&after, &total)); WANT(after == before);
    cudaDeviceProp d; CHECK(cudaGetDeviceProperties(&d, 0)); printf("the properties have the same total: %d\n", d.totalGlobalMem == total);
}
CASE(many_allocations) {
    std::vector<uint32_t *> all(4000); auto size = [](size_t i) { return 1 + value(i, 9) % 3000; };
    for (size_t i = 0; i < all.size(); i++) fill<<<4, 256>>>(all[i] = device(size(i)), size(i), i);
    for (size_t i = 0; i < all.size(); i += 3) { CHECK(cudaFree(all[i])); all[i] = nullptr; }
    for (size_t i = 0; i < all.size(); i += 3) fill<<<4, 256>>>(all[i] = device(size(i)), size(i), i);
    auto bad = device<unsigned>(1); CHECK(cudaMemset(bad, 0, 4)); for (size_t i = 0; i < all.size(); i++) count<<<4, 256>>>(all[i], size(i), i, bad);
    unsigned n; CHECK(cudaMemcpy(&n, bad, 4, cudaMemcpyDeviceToHost)); WANT(!n); for (auto p : all) CHECK(cudaFree(p));
}
CASE(one_gibibyte) {
    const size_t n = GiB / 4; auto p = device(n); auto bad = device<unsigned>(1); CHECK(cudaMemset(bad, 0, 4));
    for (int i = 0; i < 5; i++) { fill<<<4096, 256>>>(p, n, i); count<<<4096, 256>>>(p, n, i, bad); }
    unsigned w; CHECK(cudaMemcpy(&w, bad, 4, cudaMemcpyDeviceToHost)); WANT(!w); CHECK(cudaFree(p));
}
CASE(freed_while_used) {  // cudaFree waits for the kernel that still writes
    auto p = device(MiB); auto q = device(16); CHECK(cudaMemset(q, 0, 64)); spin<<<1, 1>>>(50000000); fill<<<64, 256>>>(p, MiB, 1); fill<<<1, 16>>>(q, 16, 2);
    CHECK(cudaFree(p));
    printf("idle: %s\n", said(cudaStreamQuery(0))); WANT(!wrong_on_device(q, 16, 2));
}
CASE(address_again) {  // a freed address may be had again and is then somebody else's memory
    for (int i = 0; i < 200; i++) { size_t n = 10000 + i % 7 * 100000; auto p = device(n); fill<<<64, 256>>>(p, n, i);
    if (i % 10 == 0) WANT(!wrong_on_device(p, n, i)); CHECK(cudaFree(p)); }
}
