#!/usr/bin/env python3
"""Takes turns with a program: GIB of device memory, filled with a new value and checked in every pass, until STOP exists.

neighbour.py NAME STOP: touches STOP.ready when set up. Starts at once, being without a framework. One JSON line at the end."""
import argparse, ctypes, json, os, time
p = argparse.ArgumentParser(); p.add_argument("name"); p.add_argument("stop"); p.add_argument("--gib", type=float, default=4); p.add_argument("--mib", type=int, default=128); p.add_argument("--seconds", type=float, default=100)
a = p.parse_args()
cu = ctypes.CDLL("libcuda.so.1"); u64, size_t = ctypes.c_uint64, ctypes.c_size_t
def call(name, *args):
    r = getattr(cu, name)(*args)
    if r: raise SystemExit(f"{name}: CUDA error {r}")
ctx, stream, word = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint()
call("cuInit", 0); call("cuDevicePrimaryCtxRetain", ctypes.byref(ctx), 0); call("cuCtxSetCurrent", ctx); call("cuStreamCreate", ctypes.byref(stream), 1)
size, blocks = a.mib << 20, [u64() for _ in range(int(a.gib * 1024 / a.mib))]
for b in blocks: call("cuMemAlloc_v2", ctypes.byref(b), size_t(size))
def value(v, i): return (v * 1000003 + i) & 0xffffffff
def fill(v):
    for i, b in enumerate(blocks): call("cuMemsetD32Async", b, ctypes.c_uint(value(v, i)), size_t(size // 4), stream)
    call("cuStreamSynchronize", stream)
def wrong(v):
    n = 0
    for i, b in enumerate(blocks):
        for at in (0, size // 2, size - 4):
            call("cuMemcpyDtoH_v2", ctypes.byref(word), u64(b.value + at), size_t(4)); n += word.value != value(v, i)
    return n
fill(0); open(a.stop + ".ready", "w").close()
begin, v, bad = time.time(), 0, 0
while time.time() - begin < a.seconds and not os.path.exists(a.stop):
    v += 1; fill(v); bad += wrong(v) # the lock may be lost at any of these: what was written before is checked after
print(json.dumps(dict(name=a.name, ok=not bad, passes=v, wrong_words=bad, total_s=round(time.time() - begin, 2))), flush=True)
raise SystemExit(bad > 0)
