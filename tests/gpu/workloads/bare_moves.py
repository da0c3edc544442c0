#!/usr/bin/env python3
"""What the card does by itself: pinned copies, and bare cuMemPrefetchAsync of 8 GiB in blocks of several sizes, one thread: the
median of eight moves, and each eviction. `--link`: the copies alone, one way and both ways at once. One JSON line."""
import ctypes, json, sys, time
cu = ctypes.CDLL("libcuda.so.1"); u64, size_t = ctypes.c_uint64, ctypes.c_size_t
def call(name, *args):
    r = getattr(cu, name)(*args)
    if r: raise SystemExit(f"{name}: CUDA error {r}")
ctx, s = ctypes.c_void_p(), ctypes.c_void_p()
call("cuInit", 0); call("cuDevicePrimaryCtxRetain", ctypes.byref(ctx), 0); call("cuCtxSetCurrent", ctx); call("cuStreamCreate", ctypes.byref(s), 1)
def timed(f, gib):
    t = time.perf_counter(); f(); call("cuStreamSynchronize", s); return round(gib / (time.perf_counter() - t), 1)
out = {}
h, d, G4 = ctypes.c_void_p(), u64(), 4 << 30
call("cuMemHostAlloc", ctypes.byref(h), size_t(G4), 0); call("cuMemAlloc_v2", ctypes.byref(d), size_t(G4))
for _ in range(3):
    out["pinned_h2d"] = timed(lambda: call("cuMemcpyHtoDAsync_v2", d, h, size_t(G4), s), 4)
    out["pinned_d2h"] = timed(lambda: call("cuMemcpyDtoHAsync_v2", h, d, size_t(G4), s), 4)
if "--link" in sys.argv:
    h2, d2, s2 = ctypes.c_void_p(), u64(), ctypes.c_void_p()
    call("cuStreamCreate", ctypes.byref(s2), 1); call("cuMemHostAlloc", ctypes.byref(h2), size_t(G4), 0); call("cuMemAlloc_v2", ctypes.byref(d2), size_t(G4))
    def both(): call("cuMemcpyHtoDAsync_v2", d, h, size_t(G4), s); call("cuMemcpyDtoHAsync_v2", h2, d2, size_t(G4), s2); call("cuStreamSynchronize", s2)
    for _ in range(4): out["pinned_both"] = timed(both, 8)
    print(json.dumps(out), flush=True); sys.exit()
call("cuMemFree_v2", d); call("cuMemFreeHost", h)
for mib in (2, 20, 128, 256, 1024):
    n = 8192 // mib; bs = []
    for _ in range(n):
        b = u64(); call("cuMemAllocManaged", ctypes.byref(b), size_t(mib << 20), 1); bs.append(b)
    for b in bs: call("cuMemsetD32Async", b, 7, size_t(mib << 18), s)
    call("cuStreamSynchronize", s)
    es, qs = [], []
    for r in range(8):
        es.append(timed(lambda: [call("cuMemPrefetchAsync", b, size_t(mib << 20), -1, s) for b in bs], n * mib / 1024))
        qs.append(timed(lambda: [call("cuMemPrefetchAsync", b, size_t(mib << 20), 0, s) for b in bs], n * mib / 1024))
    out[f"evict_{mib}"], out[f"restore_{mib}"] = sorted(es)[4], sorted(qs)[4]
    out[f"evict_{mib}_all"] = es
    for b in bs: call("cuMemFree_v2", b)
print(json.dumps(out), flush=True)
