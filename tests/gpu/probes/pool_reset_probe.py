#!/usr/bin/env python3
"""Does memory of a pool outlive the context of its stream? And does the driver take back what a pool keeps unseen? pool_reset_probe.py, without the library; each case in a process of its own."""
import ctypes as C, subprocess, sys, time
D = C.CDLL("libcuda.so.1")
GIB = 1 << 30
class Location(C.Structure): _fields_ = [("kind", C.c_int), ("id", C.c_int)]
class Properties(C.Structure): _fields_ = [("allocation", C.c_int), ("handles", C.c_int), ("location", Location), ("win", C.c_void_p), ("most", C.c_size_t), ("usage", C.c_ushort), ("rest", C.c_ubyte * 54)]
class Allocation(C.Structure): _fields_ = [("kind", C.c_int), ("handles", C.c_int), ("location", Location), ("win", C.c_void_p), ("flags", C.c_ubyte * 8)]
def ok(r):
    assert r == 0, r
    return r
def primary():
    c = C.c_void_p(); ok(D.cuDevicePrimaryCtxRetain(C.byref(c), 0)); ok(D.cuCtxSetCurrent(c)); return c
def created():
    c = C.c_void_p(); ok(D.cuCtxCreate_v2(C.byref(c), 0, 0)); return c
def stream():
    s = C.c_void_p(); ok(D.cuStreamCreate(C.byref(s), 1)); return s
def default():
    p = C.c_void_p(); ok(D.cuDeviceGetDefaultMemPool(C.byref(p), 0)); return p
def own():
    p = C.c_void_p(); q = Properties(1, 0, Location(1, 0)); ok(D.cuMemPoolCreate(C.byref(p), C.byref(q))); return p
def managed():
    p = C.c_void_p(); q = Properties(2, 0, Location(1, 0)); ok(D.cuMemPoolCreate(C.byref(p), C.byref(q))); return p
def reserved(pool):
    r, u = C.c_uint64(), C.c_uint64(); a = D.cuMemPoolGetAttribute(pool, 5, C.byref(r)), D.cuMemPoolGetAttribute(pool, 7, C.byref(u))
    return f"pool answers {a}, {r.value >> 20} MiB reserved, {u.value >> 20} used"
def free():
    f, t = C.c_size_t(), C.c_size_t(); a = D.cuMemGetInfo_v2(C.byref(f), C.byref(t)); return f.value if a == 0 else -1
def made(pool, s, n=64 << 20):
    p = C.c_uint64(); ok(D.cuMemAllocFromPoolAsync(C.byref(p), C.c_size_t(n), pool, s)); ok(D.cuMemsetD32Async(p, 0x5a5a5a5a, C.c_size_t(n // 4), s)); ok(D.cuStreamSynchronize(s)); return p
def look(p, pool):
    kind, of, word = C.c_uint(), C.c_void_p(), C.c_uint()
    a = D.cuPointerGetAttribute(C.byref(kind), 2, p), D.cuPointerGetAttribute(C.byref(of), 17, p)
    r = D.cuMemcpyDtoH_v2(C.byref(word), p, C.c_size_t(4)); w = D.cuMemsetD32_v2(p, 7, C.c_size_t(1)); y = D.cuCtxSynchronize()
    print(f"    attributes {a}, its pool {of.value == pool.value}, a read {r} {word.value:#x}, a fill {w}, synchronized {y}; {reserved(pool)}", flush=True)
    q, s = C.c_uint64(), C.c_void_p(); D.cuStreamCreate(C.byref(s), 1)
    print(f"    a new allocation of the pool {D.cuMemAllocFromPoolAsync(C.byref(q), C.c_size_t(1 << 20), pool, s)}, freed {D.cuMemFree_v2(p)}; {reserved(pool)}", flush=True)
def case(pool_of, where, end, second):
    """Memory of `pool_of`, made on a stream of `where`; `end` ends a context; the look is from another one."""
    first = primary(); other = created() if second else None; ok(D.cuCtxSetCurrent(first if where == "primary" else other))
    pool = pool_of(); p = made(pool, stream())
    if end == "reset": ok(D.cuDevicePrimaryCtxReset_v2(0))
    elif end == "release": ok(D.cuDevicePrimaryCtxRelease_v2(0))
    else: ok(D.cuCtxDestroy_v2(other))
    if end == "destroy": ok(D.cuCtxSetCurrent(first))
    elif second: ok(D.cuCtxSetCurrent(other))
    else: primary()
    look(p, pool)
def graph():
    """Memory of a captured graph, which a second context looks at after a reset of the primary one."""
    primary(); other = created(); first = primary(); s = stream(); g, e, p = C.c_void_p(), C.c_void_p(), C.c_uint64()
    ok(D.cuStreamBeginCapture_v2(s, 2)); ok(D.cuMemAllocAsync(C.byref(p), C.c_size_t(64 << 20), s)); ok(D.cuMemsetD32Async(p, 5, C.c_size_t(16), s)); ok(D.cuStreamEndCapture(s, C.byref(g)))
    ok(D.cuGraphInstantiateWithFlags(C.byref(e), g, C.c_uint64(0))); ok(D.cuGraphLaunch(e, s)); ok(D.cuStreamSynchronize(s))
    def attribute(n): v = C.c_uint64(); a = D.cuDeviceGetGraphMemAttribute(0, n, C.byref(v)); return a, v.value >> 20
    print("    before: used, reserved", attribute(0), attribute(2), flush=True); ok(D.cuDevicePrimaryCtxReset_v2(0)); ok(D.cuCtxSetCurrent(other)); word = C.c_uint()
    print("    after: used, reserved", attribute(0), attribute(2), "a read", D.cuMemcpyDtoH_v2(C.byref(word), p, C.c_size_t(4)), word.value, "freed", D.cuMemFree_v2(p), flush=True)
def current():
    """The current pool of the device, and a pool that is destroyed while its memory is in use, at a reset."""
    primary(); pool, other = own(), created(); now = C.c_void_p(); ok(D.cuDeviceSetMemPool(0, pool)); p = made(pool, stream()); ok(D.cuDevicePrimaryCtxReset_v2(0)); primary()
    print("    asked for the current pool:", D.cuDeviceGetMemPool(C.byref(now), 0), "it is the program's own:", now.value == pool.value, "the default one:", now.value == default().value, "destroyed:", D.cuMemPoolDestroy(pool), "a read:", D.cuMemcpyDtoH_v2(C.byref(C.c_uint()), p, C.c_size_t(4)), flush=True)
def seen_full():
    """The card is full but for a GiB and what a pool with a threshold keeps, which is synchronized: the next allocations."""
    primary(); pool = default(); s = stream(); fill = C.c_uint64(); ok(D.cuMemAlloc_v2(C.byref(fill), C.c_size_t(free() - 5 * GIB))); ok(D.cuMemPoolSetAttribute(pool, 4, C.byref(C.c_uint64(1 << 40))))
    q, h, a = C.c_uint64(), C.c_uint64(), Allocation(1, 0, Location(1, 0), None); n = C.c_size_t(3 * GIB)
    for name, call, back in (("cuMemAlloc", lambda: D.cuMemAlloc_v2(C.byref(q), n), lambda: D.cuMemFree_v2(q)), ("cuMemCreate", lambda: D.cuMemCreate(C.byref(h), n, C.byref(a), C.c_uint64(0)), lambda: D.cuMemRelease(h)), ("cuMemAllocAsync of another pool", lambda: D.cuMemAllocFromPoolAsync(C.byref(q), n, own(), s), lambda: D.cuMemFreeAsync(q, s))):
        p = C.c_uint64(); ok(D.cuMemAllocAsync(C.byref(p), C.c_size_t(4 * GIB), s)); ok(D.cuMemFreeAsync(p, s)); ok(D.cuCtxSynchronize()); before = free() >> 20; r = call()
        print(f"    {before} MiB free, 3 GiB by {name}: {r}; {reserved(pool)}", flush=True)
        if r == 0: back()
        ok(D.cuCtxSynchronize()); ok(D.cuMemPoolTrimTo(pool, C.c_size_t(0)))
def unseen_context():
    """A free that nobody has synchronized with, and the end of its stream, of its context."""
    first = primary(); pool = default()
    for end in ("stream", "context"):
        other = created(); s = stream(); p = C.c_uint64(); ok(D.cuMemAllocAsync(C.byref(p), C.c_size_t(2 * GIB), s)); ok(D.cuMemFreeAsync(p, s))
        while D.cuStreamQuery(s): time.sleep(0.001)
        print("    freed:", reserved(pool), flush=True)
        if end == "stream": ok(D.cuStreamDestroy_v2(s)); print("    its stream ends:", reserved(pool), flush=True)
        else: ok(D.cuCtxDestroy_v2(other)); print("    its context ends:", reserved(pool), flush=True)
        ok(D.cuCtxSetCurrent(first)); print("    trimmed:", D.cuMemPoolTrimTo(pool, C.c_size_t(0)), reserved(pool), flush=True); ok(D.cuCtxSetCurrent(first)); D.cuCtxSynchronize()
        if end == "stream": ok(D.cuCtxDestroy_v2(other)); ok(D.cuCtxSetCurrent(first))
def unseen_full():
    """The card is full but for a GiB and what a pool keeps unseen: the next allocations of the same program."""
    primary(); pool = default(); s, t = stream(), stream(); fill = C.c_uint64(); ok(D.cuMemAlloc_v2(C.byref(fill), C.c_size_t(free() - 5 * GIB)))
    def kept():
        ok(D.cuCtxSynchronize()); p = C.c_uint64(); ok(D.cuMemAllocAsync(C.byref(p), C.c_size_t(4 * GIB), s)); ok(D.cuMemFreeAsync(p, s))
        while D.cuStreamQuery(s): time.sleep(0.001)
    q, h, a = C.c_uint64(), C.c_uint64(), Allocation(1, 0, Location(1, 0), None); n = C.c_size_t(3 * GIB)
    for name, call, back in (("cuMemAlloc", lambda: D.cuMemAlloc_v2(C.byref(q), n), lambda: D.cuMemFree_v2(q)), ("cuMemCreate", lambda: D.cuMemCreate(C.byref(h), n, C.byref(a), C.c_uint64(0)), lambda: D.cuMemRelease(h)),
                             ("cuMemAllocAsync on its stream", lambda: D.cuMemAllocAsync(C.byref(q), n, s), lambda: D.cuMemFreeAsync(q, s)), ("on another stream", lambda: D.cuMemAllocAsync(C.byref(q), n, t), lambda: D.cuMemFreeAsync(q, t)),
                             ("of another pool", lambda: D.cuMemAllocFromPoolAsync(C.byref(q), n, other, t), lambda: D.cuMemFreeAsync(q, t))):
        other = own(); kept(); before = free() >> 20; begin = time.time(); r = call()
        print(f"    {before} MiB free, 3 GiB by {name}: {r} in {time.time() - begin:.3f} s; {reserved(pool)}", flush=True)
        if r == 0: back()
CASES = {f"{name} pool, of a stream of {where}; {end} with{'' if second else 'out'} a second context": (case, pool, where, end, second)
         for name, pool in (("default", default), ("own", own), ("managed", managed)) for where, end, second in (("primary", "reset", True), ("primary", "reset", False), ("primary", "release", True), ("primary", "release", False), ("created", "reset", True), ("created", "destroy", True))}
CASES |= {"memory of a graph": (graph,), "the current pool": (current,), "frees that nobody saw": (unseen_context,), "a full card, seen": (seen_full,), "a full card": (unseen_full,)}
if len(sys.argv) > 1:
    ok(D.cuInit(0)); f, *arguments = CASES[sys.argv[1]]; f(*arguments)
else:
    for name in CASES:
        print(name, flush=True); done = subprocess.run([sys.executable, __file__, name], stderr=subprocess.PIPE, text=True, timeout=60)
        if done.returncode: print("    ended with", done.returncode, done.stderr.strip().splitlines()[-1:], flush=True)
