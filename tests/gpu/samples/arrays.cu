// Arrays, mipmaps, textures, surfaces: array memory is another kind, and textures also lie over linear and pitched memory from
// cudaMalloc, which an interposer may have exchanged. Descriptions and formats have to come back as given.
#include "check.h"
const int W = 131, H = 67, D = 5;
using Texture = cudaTextureObject_t; using Surface = cudaSurfaceObject_t;
__global__ void read_linear(Texture t, float *o, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) o[i] = tex1Dfetch<float>(t, i); }
__global__ void read_2d(Texture t, float *o) { int x = threadIdx.x, y = blockIdx.x; o[y * W + x] = tex2D<float>(t, x + .5f, y + .5f); }
__global__ void read_3d(Texture t, float *o) {
    int x = threadIdx.x, y = blockIdx.x, z = blockIdx.y; o[(z * H + y) * W + x] = tex3D<float>(t, x + .5f, y + .5f, z + .5f);
}
__global__ void read_layered(Texture t, float *o) {
    int x = threadIdx.x, y = blockIdx.x, z = blockIdx.y; o[(z * H + y) * W + x] = tex2DLayered<float>(t, x + .5f, y + .5f, z);
}
__global__ void read_cube(Texture t, float *o) {
    const float d[6][3] = {{1, 0, 0}, {-1, 0, 0}, {0, 1, 0}, {0, -1, 0}, {0, 0, 1}, {0, 0, -1}}; auto v = d[threadIdx.x];
    o[threadIdx.x] = texCubemap<float>(t, v[0], v[1], v[2]);
}
__global__ void read_level(Texture t, float *o, int level) { o[threadIdx.x] = tex2DLod<float>(t, .5f, .5f, level); }
__global__ void read_between(Texture t, float *o) { o[threadIdx.x] = tex1D<float>(t, threadIdx.x * .25f + .5f); }
__global__ void write_2d(Surface s) { surf2Dwrite(float(blockIdx.x * W + threadIdx.x), s, threadIdx.x * 4, blockIdx.x); }
__global__ void double_2d(Surface s) { float v; surf2Dread(&v, s, threadIdx.x * 4, blockIdx.x); surf2Dwrite(2 * v, s, threadIdx.x * 4, blockIdx.x); }
static const auto FLOAT = cudaCreateChannelDesc<float>();
static Texture texture(const cudaResourceDesc &r, cudaTextureFilterMode filter = cudaFilterModePoint, bool normal = false) {
    cudaTextureDesc d{}; d.addressMode[0] = d.addressMode[1] = d.addressMode[2] = normal ? cudaAddressModeWrap : cudaAddressModeClamp; d.filterMode = filter;
    d.normalizedCoords = normal; d.readMode = cudaReadModeElementType; d.maxMipmapLevelClamp = 9; Texture t;
    CHECK(cudaCreateTextureObject(&t, &r, &d, nullptr)); return t;
}
static cudaResourceDesc over(cudaArray_t a) { cudaResourceDesc r{}; r.resType = cudaResourceTypeArray; r.res.array.array = a; return r; }
static std::vector<float> numbers(size_t n, float from = 0) { std::vector<float> v(n); for (size_t i = 0; i < n; i++) v[i] = from + i; return v; }
static void same(const float *d, const std::vector<float> &v) {
    std::vector<float> o(v.size()); CHECK(cudaMemcpy(o.data(), d, o.size() * 4, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < v.size(); i++) WANT(o[i] == v[i]);
}

CASE(linear) {  // over cudaMalloc memory; small and large, since an interposer may treat them differently
    for (int n : {1000, 1 << 20}) { auto d = device<float>(n), o = device<float>(n); auto v = numbers(n);
    CHECK(cudaMemcpy(d, v.data(), n * 4, cudaMemcpyHostToDevice)); cudaResourceDesc r{}; r.resType = cudaResourceTypeLinear; r.res.linear.devPtr = d;
    r.res.linear.desc = FLOAT; r.res.linear.sizeInBytes = n * 4; Texture t = texture(r); read_linear<<<grid(n), 256>>>(t, o, n); same(o, v);
    cudaResourceDesc seen; CHECK(cudaGetTextureObjectResourceDesc(&seen, t)); WANT(seen.res.linear.devPtr == d && seen.res.linear.sizeInBytes == size_t(n) * 4);
    CHECK(cudaDestroyTextureObject(t)); }
}
CASE(pitched) {
    float *d; size_t pitch; CHECK(cudaMallocPitch(&d, &pitch, W * 4, H)); auto v = numbers(W * H); auto o = device<float>(W * H);
    CHECK(cudaMemcpy2D(d, pitch, v.data(), W * 4, W * 4, H, cudaMemcpyHostToDevice)); cudaResourceDesc r{}; r.resType = cudaResourceTypePitch2D;
    r.res.pitch2D = {d, FLOAT, size_t(W), size_t(H), pitch}; read_2d<<<H, W>>>(texture(r), o); CHECK(cudaDeviceSynchronize()); same(o, v);
    cudaDeviceProp p; CHECK(cudaGetDeviceProperties(&p, 0)); printf("alignment %zu %zu pitch %zu\n", p.textureAlignment, p.texturePitchAlignment, p.memPitch);
}
CASE(two_dimensions) {
    cudaArray_t a, b; auto v = numbers(W * H); auto o = device<float>(W * H); CHECK(cudaMallocArray(&a, &FLOAT, W, H));
    CHECK(cudaMallocArray(&b, &FLOAT, W, H)); CHECK(cudaMemcpy2DToArray(a, 0, 0, v.data(), W * 4, W * 4, H, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy2DArrayToArray(b, 0, 0, a, 0, 0, W * 4, H)); read_2d<<<H, W>>>(texture(over(b)), o); same(o, v);
    std::vector<float> back(W * H); CHECK(cudaMemcpy2DFromArray(back.data(), W * 4, b, 0, 0, W * 4, H, cudaMemcpyDeviceToHost)); WANT(back == v);
    auto d = device<float>(W * H); CHECK(cudaMemcpy2DFromArrayAsync(d, W * 4, a, 0, 0, W * 4, H, cudaMemcpyDefault, 0)); same(d, v);
    CHECK(cudaMemset(d, 0, W * H * 4)); CHECK(cudaMemcpy2DToArray(a, 0, 0, d, W * 4, W * 4, H, cudaMemcpyDeviceToDevice));
    CHECK(cudaMemcpy2DFromArray(back.data(), W * 4, a, 0, 0, W * 4, H, cudaMemcpyDeviceToHost)); WANT(back[W * H - 1] == 0);
    cudaChannelFormatDesc f; cudaExtent e; unsigned flags; CHECK(cudaArrayGetInfo(&f, &e, &flags, b));
    printf("%zu %zu %zu flags %u bits %d\n", e.width, e.height, e.depth, flags, f.x); cudaArrayMemoryRequirements m;
    SAY(cudaArrayGetMemoryRequirements(&m, a, 0)); CHECK(cudaFreeArray(a)); CHECK(cudaFreeArray(b)); SAY(cudaFreeArray(nullptr));
    SAY(cudaMallocArray(&a, &FLOAT, 1 << 30, 1 << 30)); SAY(cudaMallocArray(&a, &FLOAT, 0, 0)); SAY(cudaMallocArray(nullptr, &FLOAT, 4, 4)); cudaGetLastError();
}
static cudaArray_t volume(const std::vector<float> &v, unsigned flags) {
    cudaArray_t a; auto e = make_cudaExtent(W, H, D); CHECK(cudaMalloc3DArray(&a, &FLOAT, e, flags)); cudaMemcpy3DParms c{};
    c.srcPtr = make_cudaPitchedPtr((void *)v.data(), W * 4, W, H); c.dstArray = a; c.extent = e; c.kind = cudaMemcpyHostToDevice; CHECK(cudaMemcpy3D(&c));
    return a;
}
CASE(three_dimensions) {
    auto v = numbers(W * H * D); auto o = device<float>(v.size()); read_3d<<<dim3(H, D), W>>>(texture(over(volume(v, 0))), o); same(o, v);
}
CASE(layered) {
    auto v = numbers(W * H * D); auto o = device<float>(v.size()); read_layered<<<dim3(H, D), W>>>(texture(over(volume(v, cudaArrayLayered))), o); same(o, v);
}
CASE(cube) {
    cudaArray_t a; CHECK(cudaMalloc3DArray(&a, &FLOAT, make_cudaExtent(8, 8, 6), cudaArrayCubemap)); std::vector<float> v(384);
    for (int i = 0; i < 384; i++) v[i] = i / 64; cudaMemcpy3DParms c{}; c.srcPtr = make_cudaPitchedPtr(v.data(), 32, 8, 8); c.dstArray = a;
    c.extent = make_cudaExtent(8, 8, 6); c.kind = cudaMemcpyHostToDevice; CHECK(cudaMemcpy3D(&c)); auto o = device<float>(6);
    read_cube<<<1, 6>>>(texture(over(a), cudaFilterModePoint, true), o); same(o, numbers(6));
}
CASE(filtered) {
    cudaArray_t a; CHECK(cudaMallocArray(&a, &FLOAT, 8)); auto v = numbers(8); CHECK(cudaMemcpy2DToArray(a, 0, 0, v.data(), 32, 32, 1, cudaMemcpyHostToDevice));
    auto o = device<float>(28); read_between<<<1, 28>>>(texture(over(a), cudaFilterModeLinear), o); std::vector<float> want(28);
    for (int i = 0; i < 28; i++) want[i] = i * .25f; same(o, want);
}
CASE(mipmaps) {
    cudaMipmappedArray_t m; CHECK(cudaMallocMipmappedArray(&m, &FLOAT, make_cudaExtent(64, 64, 0), 7)); for (int l = 0; l < 7; l++) { cudaArray_t a;
    CHECK(cudaGetMipmappedArrayLevel(&a, m, l)); int s = 64 >> l; std::vector<float> v(s * s, 10.f * l);
    CHECK(cudaMemcpy2DToArray(a, 0, 0, v.data(), s * 4, s * 4, s, cudaMemcpyHostToDevice)); }
    cudaResourceDesc r{}; r.resType = cudaResourceTypeMipmappedArray; r.res.mipmap.mipmap = m; Texture t = texture(r, cudaFilterModePoint, true);
    auto o = device<float>(1); for (int l = 0; l < 7; l++) { read_level<<<1, 1>>>(t, o, l); same(o, {10.f * l}); } CHECK(cudaDestroyTextureObject(t));
    CHECK(cudaFreeMipmappedArray(m));
}
CASE(surfaces) {
    cudaArray_t a; CHECK(cudaMallocArray(&a, &FLOAT, W, H, cudaArraySurfaceLoadStore)); auto r = over(a); Surface s; CHECK(cudaCreateSurfaceObject(&s, &r));
    write_2d<<<H, W>>>(s); double_2d<<<H, W>>>(s); std::vector<float> back(W * H);
    CHECK(cudaMemcpy2DFromArray(back.data(), W * 4, a, 0, 0, W * 4, H, cudaMemcpyDeviceToHost)); for (int i = 0; i < W * H; i++) WANT(back[i] == 2.f * i);
    CHECK(cudaDestroySurfaceObject(s));
}
CASE(driver_arrays) {  // what interposers' own tests make: created, described, over the limit, destroyed
    CHECK(cudaFree(0)); CUarray a; CUDA_ARRAY_DESCRIPTOR d{1024, 512, CU_AD_FORMAT_UNSIGNED_INT8, 4}, seen; CHECK(cuArrayCreate(&a, &d));
    CHECK(cuArrayGetDescriptor(&seen, a)); printf("%zu %zu %d %u\n", seen.Width, seen.Height, seen.Format, seen.NumChannels); CHECK(cuArrayDestroy(a));
    SAY(cuArrayCreate(&a, nullptr));
    CUDA_ARRAY3D_DESCRIPTOR v{64, 64, 64, CU_AD_FORMAT_FLOAT, 2, CUDA_ARRAY3D_SURFACE_LDST}, w; CHECK(cuArray3DCreate(&a, &v));
    CHECK(cuArray3DGetDescriptor(&w, a)); printf("%zu %zu %zu %d %u %u\n", w.Width, w.Height, w.Depth, w.Format, w.NumChannels, w.Flags);
    CHECK(cuArrayDestroy(a)); v.NumChannels = 3; SAY(cuArray3DCreate(&a, &v)); v.NumChannels = 1; v.Width = v.Height = v.Depth = 16384;
    SAY(cuArray3DCreate(&a, &v));
    CUDA_ARRAY3D_DESCRIPTOR l{8, 8, 0, CU_AD_FORMAT_HALF, 1, 0}; CUmipmappedArray m; CHECK(cuMipmappedArrayCreate(&m, &l, 3));
    CHECK(cuMipmappedArrayGetLevel(&a, m, 2)); CHECK(cuArrayGetDescriptor(&seen, a)); printf("%zu %zu\n", seen.Width, seen.Height);
    SAY(cuMipmappedArrayGetLevel(&a, m, 3)); CHECK(cuMipmappedArrayDestroy(m));
}
CASE(array_rows) {
    CHECK(cudaFree(0)); CUarray a; CUDA_ARRAY_DESCRIPTOR d{5000, 0, CU_AD_FORMAT_UNSIGNED_INT32, 1}; CHECK(cuArrayCreate(&a, &d)); auto p = device(5000);
    fill<<<8, 256>>>(p, 5000, 1); CHECK(cuMemcpyDtoA(a, 0, CUdeviceptr(p), 20000)); std::vector<uint32_t> v(5000); CHECK(cuMemcpyAtoH(v.data(), a, 0, 20000));
    WANT(!wrong(v.data(), 5000, 1)); fill_host(v.data(), 5000, 2); CHECK(cuMemcpyHtoA(a, 0, v.data(), 20000)); CHECK(cuMemcpyAtoD(CUdeviceptr(p), a, 0, 20000));
    WANT(!wrong_on_device(p, 5000, 2));
}
