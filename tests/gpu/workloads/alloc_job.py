#!/usr/bin/env python3
"""PAIRS of an allocation of device memory and its free, of each of some sizes, while nothing runs on the card; speaks the driver API itself.
One JSON line at the end: microseconds of both, medians and the slowest of a hundred (`p99`), by MiB."""
import argparse, ctypes, json, time
p = argparse.ArgumentParser(); p.add_argument("name"); p.add_argument("--pairs", type=int, default=300); p.add_argument("--mib", type=int, nargs="+", default=[1, 2, 20, 128])
a = p.parse_args()
cu, u64, size_t = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64, ctypes.c_size_t
def call(name, *args):
    r = getattr(cu, name)(*args)
    if r: raise SystemExit(f"{name}: CUDA error {r}")
ctx = ctypes.c_void_p(); call("cuInit", 0); call("cuDevicePrimaryCtxRetain", ctypes.byref(ctx), 0); call("cuCtxSetCurrent", ctx)
kept = u64(); call("cuMemAlloc_v2", ctypes.byref(kept), size_t(2 << 20))
def work():
    """Work makes the program take its turn: without it, memory would have addresses alone."""
    call("cuMemsetD32Async", kept, 0, size_t(1 << 19), None); call("cuCtxSynchronize")
out = dict(name=a.name)
for mib in a.mib:
    at, took = u64(), ([], [])
    for i in range(a.pairs + 20):
        if i % 20 == 0: work()
        begin = time.perf_counter(); call("cuMemAlloc_v2", ctypes.byref(at), size_t(mib << 20))
        middle = time.perf_counter(); call("cuMemFree_v2", at)
        end = time.perf_counter()
        if i >= 20: took[0].append(middle - begin); took[1].append(end - middle)
    both = sorted(one + other for one, other in zip(*took))
    middle_of = lambda times: round(sorted(times)[len(times) // 2] * 1e6, 1)
    out[mib] = dict(alloc=middle_of(took[0]), free=middle_of(took[1]), both=middle_of(both), p99=round(both[len(both) * 99 // 100] * 1e6, 1))
print(json.dumps(out), flush=True)
