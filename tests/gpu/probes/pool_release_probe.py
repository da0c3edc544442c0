#!/usr/bin/env python3
"""When does the driver give back memory of a pool without a threshold, and which questions wait beside a full queue? pool_release_probe.py, without the library."""
import ctypes as C, threading, time
D = C.CDLL("libcuda.so.1")
GIB = 1 << 30
def ok(r, what=""):
    assert r == 0, (r, what)
    return r
ok(D.cuInit(0)); ctx = C.c_void_p(); ok(D.cuDevicePrimaryCtxRetain(C.byref(ctx), 0)); ok(D.cuCtxSetCurrent(ctx))
def free():
    f, t = C.c_size_t(), C.c_size_t(); ok(D.cuMemGetInfo_v2(C.byref(f), C.byref(t))); return f.value >> 20
pool = C.c_void_p(); ok(D.cuDeviceGetDefaultMemPool(C.byref(pool), 0))
def reserved():
    v = C.c_uint64(); ok(D.cuMemPoolGetAttribute(pool, 5, C.byref(v))); return v.value >> 20
stream = C.c_void_p(); ok(D.cuStreamCreate(C.byref(stream), 1))
def cycle(n):
    p = C.c_uint64(); ok(D.cuMemAllocAsync(C.byref(p), C.c_size_t(n), stream)); ok(D.cuMemsetD8Async(p, 1, C.c_size_t(n), stream)); ok(D.cuMemFreeAsync(p, stream))
    while D.cuStreamQuery(stream): time.sleep(0.001)
print("before", free(), "MiB free,", reserved(), "reserved", flush=True)
for i in range(2):
    cycle(4 * GIB); time.sleep(0.5)
    print("freed, complete by query", reserved(), "reserved,", free(), "free", flush=True)
event = C.c_void_p(); ok(D.cuEventCreate(C.byref(event), 2)); ok(D.cuEventRecord(event, stream))
while D.cuEventQuery(event): time.sleep(0.001)
print("an event behind it is complete", reserved(), "reserved", flush=True)
ok(D.cuMemPoolTrimTo(pool, C.c_size_t(0)))
print("trimmed at once", reserved(), "reserved,", free(), "free", flush=True)
cycle(4 * GIB); ok(D.cuStreamSynchronize(stream)); print("stream synchronized", reserved(), "reserved", flush=True)
cycle(4 * GIB); ok(D.cuCtxSynchronize()); print("context synchronized", reserved(), "reserved", flush=True)
def wait(e):
    while D.cuEventQuery(e): time.sleep(0.001)
    return 0
other = C.c_void_p(); ok(D.cuStreamCreate(C.byref(other), 1))
class Location(C.Structure): _fields_ = [("kind", C.c_int), ("id", C.c_int)]
class Properties(C.Structure): _fields_ = [("allocation", C.c_int), ("handles", C.c_int), ("location", Location), ("win", C.c_void_p), ("most", C.c_size_t), ("usage", C.c_ushort), ("rest", C.c_ubyte * 54)]
for kind in ("default pool", "managed pool"):
    if kind == "managed pool":
        properties, made = Properties(2, 0, Location(1, 0)), C.c_void_p()
        answer = D.cuMemPoolCreate(C.byref(made), C.byref(properties))
        if answer: print("no managed pool", answer); break
        pool = made
        def cycle(n):
            p = C.c_uint64(); ok(D.cuMemAllocFromPoolAsync(C.byref(p), C.c_size_t(n), pool, stream)); ok(D.cuMemsetD8Async(p, 1, C.c_size_t(n), stream)); ok(D.cuMemFreeAsync(p, stream))
            while D.cuStreamQuery(stream): time.sleep(0.001)
    for name, call in (("nothing", lambda: 0), ("trim", lambda: D.cuMemPoolTrimTo(pool, C.c_size_t(0))), ("another stream synchronized", lambda: D.cuStreamSynchronize(other)), ("an event of another stream synchronized", lambda: D.cuEventRecord(event, other) or D.cuEventSynchronize(event)),
                       ("an event behind it synchronized", lambda: D.cuEventRecord(event, stream) or D.cuEventSynchronize(event)), ("an event behind the context queried", lambda: D.cuCtxRecordEvent(ctx, event) or wait(event)), ("an event behind the context queried, then synchronized", lambda: D.cuCtxRecordEvent(ctx, event) or wait(event) or D.cuEventSynchronize(event)), ("memory of cuMemAlloc made and freed", lambda: D.cuMemAlloc_v2(C.byref(v0), C.c_size_t(1 << 21)) or D.cuMemFree_v2(v0)),
                       ("its stream synchronized", lambda: D.cuStreamSynchronize(stream)), ("the context synchronized", lambda: D.cuCtxSynchronize()),
                       ("another allocation and free", lambda: D.cuMemAllocAsync(C.byref(v0), C.c_size_t(1 << 20), other) or D.cuMemFreeAsync(v0, other) or D.cuStreamSynchronize(other))):
        v0 = C.c_uint64(); ok(D.cuCtxSynchronize()); cycle(2 * GIB); answer = call(); print(kind, "-", name, answer, "->", reserved(), "reserved,", free(), "free; trimmed then", D.cuMemPoolTrimTo(pool, C.c_size_t(0)), reserved(), flush=True)
ok(D.cuDeviceGetDefaultMemPool(C.byref(pool), 0)); ok(D.cuCtxSynchronize())
# A full queue behind a host function: which questions come back?
done = C.c_void_p(); ok(D.cuEventCreate(C.byref(done), 2)); ok(D.cuEventRecord(done, stream)); ok(D.cuEventSynchronize(done))
FN = C.CFUNCTYPE(None, C.c_void_p); go = threading.Event(); hold = FN(lambda _: go.wait(60)); begun = threading.Event()
ok(D.cuLaunchHostFunc(stream, hold, None)); p = C.c_uint64(); ok(D.cuMemAlloc_v2(C.byref(p), C.c_size_t(4096)))
count = [0]
def fill():
    D.cuCtxSetCurrent(ctx)
    for _ in range(20000): D.cuMemsetD8Async(p, 1, C.c_size_t(4096), stream); count[0] += 1
def last(name, call):
    took = [None]
    def run():
        D.cuCtxSetCurrent(ctx); b = time.time(); call(); took[0] = time.time() - b
    t = threading.Thread(target=run, daemon=True); t.start(); t.join(2); print("full queue:", name, "waits" if took[0] is None else f"{1e6 * took[0]:.0f} us", flush=True)
f = threading.Thread(target=fill, daemon=True); f.start(); time.sleep(3); print("queue holds", count[0], "fills; its thread waits:", f.is_alive(), flush=True)
v = C.c_uint64(); used = C.c_uint64()
last("cuEventQuery of a complete event", lambda: D.cuEventQuery(done))
last("cuEventSynchronize with a complete event", lambda: D.cuEventSynchronize(done))
last("cuMemPoolGetAttribute reserved", lambda: D.cuMemPoolGetAttribute(pool, 5, C.byref(v)))
last("cuMemPoolGetAttribute used", lambda: D.cuMemPoolGetAttribute(pool, 7, C.byref(used)))
last("cuDeviceGetGraphMemAttribute", lambda: D.cuDeviceGetGraphMemAttribute(0, 2, C.byref(v)))
last("cuMemPoolTrimTo", lambda: D.cuMemPoolTrimTo(pool, C.c_size_t(0)))
last("cuDeviceGraphMemTrim", lambda: D.cuDeviceGraphMemTrim(0))
last("cuStreamQuery", lambda: D.cuStreamQuery(stream))
go.set(); f.join(30); ok(D.cuCtxSynchronize()); print("over", flush=True)
# Does memory that a pool still has keep memory from cuMemCreate, and from another process's?
class Allocation(C.Structure): _fields_ = [("kind", C.c_int), ("handles", C.c_int), ("location", Location), ("win", C.c_void_p), ("flags", C.c_ubyte * 8)]
cycle(2 * GIB); h, a = C.c_uint64(), Allocation(1, 0, Location(1, 0), None); n = (free() + 1024) & ~1
begin = time.time(); answer = D.cuMemCreate(C.byref(h), C.c_size_t(n << 20), C.byref(a), C.c_uint64(0))
print(f"cuMemCreate of {n} MiB, a GiB more than is free, of which the pool has two:", answer, f"{time.time() - begin:.2f} s,", reserved(), "reserved", flush=True)
