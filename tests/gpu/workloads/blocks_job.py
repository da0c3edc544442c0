#!/usr/bin/env python3
"""GIB of device memory of each of GPUS in blocks of MIB, filled with a new value by cuMemsetD32 in every pass; speaks the driver API itself.

One JSON line at the end: passes, their times, and whether every word sampled was what the passes must have left."""
import argparse, ctypes, json, os, time
p = argparse.ArgumentParser(); p.add_argument("name"); p.add_argument("--gib", type=float, default=12); p.add_argument("--mib", type=int, default=256); p.add_argument("--seconds", type=float, default=20); p.add_argument("--gpus", type=int, default=1)
a = p.parse_args()
cu = ctypes.CDLL("libcuda.so.1"); u64 = ctypes.c_uint64
def call(name, *args):
    r = getattr(cu, name)(*args)
    if r: raise SystemExit(f"{name}: CUDA error {r}")
call("cuInit", 0)
size, n = a.mib << 20, int(a.gib * 1024 / a.mib) * a.gpus
gpus, blocks = [], []
for ordinal in range(a.gpus):
    ctx, stream = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(ctx), ordinal); call("cuCtxSetCurrent", ctx); call("cuStreamCreate", ctypes.byref(stream), 1)
    gpus.append((ctx, stream))
    for _ in range(n // a.gpus):
        b = u64(); call("cuMemAlloc_v2", ctypes.byref(b), ctypes.c_size_t(size)); blocks.append(b)
def fill(v):
    for at, (ctx, stream) in enumerate(gpus):
        call("cuCtxSetCurrent", ctx)
        for i in range(at * n // a.gpus, (at + 1) * n // a.gpus): call("cuMemsetD32Async", blocks[i], ctypes.c_uint((v * 1000003 + i) & 0xffffffff), ctypes.c_size_t(size // 4), stream)
    for ctx, stream in gpus: call("cuCtxSetCurrent", ctx); call("cuStreamSynchronize", stream)
def wrong(i, at):
    call("cuCtxSetCurrent", gpus[i * a.gpus // n][0]); call("cuMemcpyDtoH_v2", ctypes.byref(word), u64(blocks[i].value + at), ctypes.c_size_t(4))
    return word.value != (v * 1000003 + i) & 0xffffffff
fill(0)
if go := os.environ.get("GO"):
    open(f"{go}.{a.name}", "w").close()
    while not os.path.exists(go): time.sleep(0.002)
s, ts, v, bad = time.time(), [], 0, 0
word = ctypes.c_uint()
while time.time() - s < a.seconds:
    t = time.time(); v += 1; fill(v); ts.append(time.time() - t)
    if v % 64 == 0:
        for i in range(0, n, max(1, n // 64)):
            for at in (0, size // 2, size - 4): bad += wrong(i, at)
for i in range(n):
    for at in (0, size // 4 * 2, size - 4): bad += wrong(i, at)
end = time.time(); ts.sort()
print(json.dumps(dict(name=a.name, gib=n * a.mib / 1024, gpus=a.gpus, mib=a.mib, passes=v, pass_ms=dict(p50=round(ts[len(ts) // 2] * 1e3, 2), max=round(ts[-1] * 1e3, 1)), start=s, end=end, total_s=round(end - s, 2), wrong_words=bad)), flush=True)
