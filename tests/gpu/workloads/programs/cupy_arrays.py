#!/usr/bin/env python3
"""CuPy: cuBLAS products of whole numbers, element by element arithmetic, a kernel of its own, its memory pool, copies to the host."""
import program
program.need("cupy")
import cupy as cp
mix = cp.RawKernel('extern "C" __global__ void mix(unsigned* x, unsigned n, unsigned salt) { for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) x[i] = x[i] * 1664525u + salt; }', "mix")
SIDE = 4096
a = (cp.arange(SIDE * SIDE, dtype=cp.int64) * 7919 % 31).astype(cp.float32).reshape(SIDE, SIDE)
b = (cp.arange(SIDE * SIDE, dtype=cp.int64) * 104729 % 7).astype(cp.float32).reshape(SIDE, SIDE)
words = cp.arange(1 << 26, dtype=cp.uint32)
seen = 0
def step(i):
    global a, b, seen
    a = ((a @ b).astype(cp.int32) % 31).astype(cp.float32)
    b = ((b + a + i) % 7).astype(cp.float32)
    mix((1024,), (256,), (words, cp.uint32(words.size), cp.uint32(1013904223 + 2 * i)))
    if i % 50 == 0: seen = (seen * 31 + int(cp.asnumpy(a[:64]).sum()) + int(words[i])) % (1 << 61)
step(0)
with program.work(cp.cuda.Device().synchronize):
    for i in range(program.steps(900)): step(i)
program.tell(f"{program.digest(a, b, words)} {seen}")
