// Looks at pieces of memory: is a piece all zero, and what is its hash? `kernel.ptx` is made from this file:
//
//   nvcc -ptx -arch=compute_75 -o kernel.ptx kernel.cu     (CUDA 13.0)
//   sed -i 's/^\.version .*/.version 6.3/; s/^\.target .*/.target sm_60/' kernel.ptx
//
// The code needs no more than those, and so every driver that maps memory can compile it.
//
// The hash is described, and computed in another way, in `client/src/content.rs`; what bounds its collisions is there too.
// Arithmetic is that of Poly1305: numbers modulo 2^130 - 5 in five words, multiplied by keys whose words leave room for carries.

typedef unsigned int u32;
typedef unsigned long long u64;

// Threads of a block, and 16-byte words that each has under way. The hash depends on THREADS.
#define THREADS 512
#define AHEAD 4

struct Key { u32 r[4]; };
// The factors: of a thread's words, of the nine bits of a thread's number, and of the sum.
struct Keys { Key word, bits[9], sum; };
// What is known of a piece. `state`: 1 all zero, 2 not.
struct Seen { u64 low, high; u32 state, unused; };
struct Number { u32 h[5]; };

static __device__ __forceinline__ void carry(Number &a, u32 into) {
    u64 c = into;
    #pragma unroll
    for (int i = 0; i < 4; i++) { c += a.h[i]; a.h[i] = (u32)c; c >>= 32; }
    a.h[4] += (u32)c;
}

// The number may be up to 2^131 then.
static __device__ __forceinline__ void reduce(Number &a) {
    u32 above = (a.h[4] >> 2) * 5;
    a.h[4] &= 3;
    carry(a, above);
}

static __device__ __forceinline__ void multiply(Number &a, const Key &k) {
    u32 r0 = k.r[0], r1 = k.r[1], r2 = k.r[2], r3 = k.r[3];
    u32 s1 = r1 + (r1 >> 2), s2 = r2 + (r2 >> 2), s3 = r3 + (r3 >> 2);
    u32 h0 = a.h[0], h1 = a.h[1], h2 = a.h[2], h3 = a.h[3], h4 = a.h[4];
    u64 d0 = (u64)h0 * r0 + (u64)h1 * s3 + (u64)h2 * s2 + (u64)h3 * s1;
    u64 d1 = (u64)h0 * r1 + (u64)h1 * r0 + (u64)h2 * s3 + (u64)h3 * s2 + h4 * s1;
    u64 d2 = (u64)h0 * r2 + (u64)h1 * r1 + (u64)h2 * r0 + (u64)h3 * s3 + h4 * s2;
    u64 d3 = (u64)h0 * r3 + (u64)h1 * r2 + (u64)h2 * r1 + (u64)h3 * r0 + h4 * s3;
    d1 += d0 >> 32; d2 += d1 >> 32; d3 += d2 >> 32;
    a.h[0] = (u32)d0; a.h[1] = (u32)d1; a.h[2] = (u32)d2; a.h[3] = (u32)d3;
    a.h[4] = h4 * r0 + (u32)(d3 >> 32);
    reduce(a);
}

static __device__ __forceinline__ void add(Number &a, const u32 w[5]) {
    u64 c = 0;
    #pragma unroll
    for (int i = 0; i < 4; i++) { c += (u64)a.h[i] + w[i]; a.h[i] = (u32)c; c >>= 32; }
    a.h[4] += w[4] + (u32)c;
}

// A thread's number, and that of the thread whose number has this bit more, as one.
static __device__ __forceinline__ void join(Number &a, Number other, const Key &bit) {
    multiply(other, bit);
    add(a, other.h);
    reduce(a);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
nvshare_content(const u64 *pieces, Seen *seen, u32 words, u32 hashes, Keys keys) {
    __shared__ u64 piece;
    __shared__ u32 warps[THREADS / 32][5];
    const u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    // The list is in the host's memory: one thread of a block reads there.
    if (thread == 0) piece = pieces[blockIdx.x];
    __syncthreads();
    const uint4 *at = (const uint4 *)piece;
    Number a = {{0, 0, 0, 0, 0}};
    u32 any = 0;
    for (u32 first = thread; first < words; first += THREADS * AHEAD) {
        uint4 v[AHEAD];
        #pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            u32 word = first + i * THREADS;
            v[i] = word < words ? __ldcs(at + word) : make_uint4(0, 0, 0, 0);
        }
        #pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            any |= v[i].x | v[i].y | v[i].z | v[i].w;
            if (hashes && first + i * THREADS < words) {
                const u32 w[5] = {v[i].x, v[i].y, v[i].z, v[i].w, 0};
                multiply(a, keys.word);
                add(a, w);
            }
        }
        // Without hashes nobody needs the rest of a piece that is not zero.
        if (!hashes && any) break;
    }
    any = __syncthreads_or(any);
    if (hashes && any) {
        reduce(a);
        #pragma unroll
        for (int bit = 0; bit < 5; bit++) {
            Number other;
            #pragma unroll
            for (int i = 0; i < 5; i++) other.h[i] = __shfl_down_sync(~0u, a.h[i], 1 << bit);
            join(a, other, keys.bits[bit]);
        }
        if (lane == 0) for (int i = 0; i < 5; i++) warps[warp][i] = a.h[i];
        __syncthreads();
        if (warp == 0) {
            for (int i = 0; i < 5; i++) a.h[i] = warps[lane & 15][i];
            #pragma unroll
            for (int bit = 0; bit < 4; bit++) {
                Number other;
                #pragma unroll
                for (int i = 0; i < 5; i++) other.h[i] = __shfl_down_sync(~0u, a.h[i], 1 << bit);
                join(a, other, keys.bits[5 + bit]);
            }
        }
    }
    if (thread == 0) {
        if (hashes && any) {
            multiply(a, keys.sum);
            reduce(a);
            // Below 2^130 + a little: minus the modulus, if it is not less than that.
            Number b = a;
            carry(b, 5);
            if (b.h[4] >> 2) { b.h[4] &= 3; a = b; }
        }
        seen[blockIdx.x].low = a.h[0] | (u64)a.h[1] << 32;
        seen[blockIdx.x].high = a.h[2] | (u64)a.h[3] << 32;
        __threadfence_system();
        seen[blockIdx.x].state = any ? 2 : 1;
    }
}
