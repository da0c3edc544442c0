#!/usr/bin/env python3
"""Numba: kernels of its compiler, shared memory, atomics, streams, pinned, mapped and managed arrays, and its own deferred frees."""
import warnings, program
program.need("numpy")
import numpy as np
if not hasattr(np, "row_stack"): np.row_stack = np.vstack  # older Numbas want it
program.need("numba.cuda")
from numba import cuda, uint32
warnings.simplefilter("ignore")  # small grids
@cuda.jit
def mix(x, salt):
    i = cuda.grid(1)
    if i < x.size: x[i] = x[i] * uint32(1664525) + uint32(salt)
@cuda.jit
def fold(x, sums):
    part = cuda.shared.array(256, uint32)
    i, t = cuda.grid(1), cuda.threadIdx.x
    part[t] = x[i] if i < x.size else uint32(0)
    cuda.syncthreads()
    n = 128
    while n:
        if t < n: part[t] += part[t + n]
        cuda.syncthreads()
        n //= 2
    if t == 0: cuda.atomic.add(sums, cuda.blockIdx.x % sums.size, part[0])
N = 1 << 25
streams = [cuda.stream() for _ in range(4)]
words = [cuda.to_device(np.arange(N, dtype=np.uint32) + k, stream=s) for k, s in enumerate(streams)]
pinned, mapped, managed = cuda.pinned_array(4096, np.uint32), cuda.mapped_array(64, np.uint32), cuda.managed_array(1 << 20, np.uint32)
mapped[:] = 0; managed[:] = np.arange(managed.size, dtype=np.uint32)
seen = 0
def step(i):
    global seen
    for k, s in enumerate(streams): mix[N // 256, 256, s](words[k], 1013904223 + 2 * i + k)
    if i % 10 == 0:
        extra = cuda.device_array(1 << 20, np.uint32, stream=streams[0])
        extra.copy_to_device(words[0][: 1 << 20], stream=streams[0])
        fold[extra.size // 256, 256, streams[0]](extra, mapped)
        extra[:4096].copy_to_host(pinned, stream=streams[0]); streams[0].synchronize()
        mix[managed.size // 256, 256](managed, i); cuda.synchronize()
        seen = (seen * 31 + int(pinned[i % 4096]) + int(managed[i % managed.size])) % (1 << 61)
step(0)
with program.work(cuda.synchronize):
    for i in range(program.steps(1500)): step(i)
program.tell(f"{program.digest(*[w.copy_to_host() for w in words], np.asarray(mapped), np.asarray(managed))} {seen}")
