#!/usr/bin/env python3
"""What each call of a move costs for many pieces of 2 MiB, one by one and for several of them at once; and whether one call does it for neighbours
that were reserved each by itself. `calls_probe.py [COUNT]` (1024 pieces)."""
import sys, time
from ctypes import CDLL, byref, c_int, c_size_t, c_uint64, c_void_p

DRIVER, PIECE = CDLL("libcuda.so.1"), 2 << 20
COUNT = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
ON_CARD, ACCESS = (c_int * 8)(1, 0, 1, 0, 0, 0, 0, 0), (c_int * 3)(1, 0, 3)
call = lambda name, *arguments: getattr(DRIVER, name)(*arguments)
reserve = lambda place, size: call("cuMemAddressReserve", byref(place), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
create = lambda handle, size: call("cuMemCreate", byref(handle), c_size_t(size), ON_CARD, c_uint64(0))
map_at = lambda at, size, handle: call("cuMemMap", c_uint64(at), c_size_t(size), c_size_t(0), handle, c_uint64(0))
access = lambda at, size: call("cuMemSetAccess", c_uint64(at), c_size_t(size), ACCESS, c_size_t(1))
unmap = lambda at, size: call("cuMemUnmap", c_uint64(at), c_size_t(size))
release = lambda handle: call("cuMemRelease", handle)


def timed(what, calls, pieces=1):
    """Makes all calls; prints their answers and what one piece takes."""
    begin = time.perf_counter()
    answers = [one() for one in calls]
    took = time.perf_counter() - begin
    seen = sorted(set(answers))
    print(f"{what:70} {took / len(answers) / pieces * 1e6:8.2f} us a piece, {took / len(answers) * 1e6:8.1f} us a call, answers {seen}", flush=True)
    return seen == [0]


def runs(places, length):
    return [places[i:i + length] for i in range(0, len(places), length)]


def moves(name, places):
    handles = [c_uint64() for _ in places]
    for length in (1, 16, 64, 256):
        timed(f"{name}: create", [lambda h=h: create(h, PIECE) for h in handles])
        timed(f"{name}: map", [lambda at=at, h=h: map_at(at, PIECE, h) for at, h in zip(places, handles)])
        if not timed(f"{name}: access, {length} at once", [lambda r=r: access(min(r), len(r) * PIECE) for r in runs(places, length)], length):
            timed(f"{name}: access, one by one", [lambda at=at: access(at, PIECE) for at in places])
        if not timed(f"{name}: unmap, {length} at once", [lambda r=r: unmap(min(r), len(r) * PIECE) for r in runs(places, length)], length):
            timed(f"{name}: unmap, one by one", [lambda at=at: unmap(at, PIECE) for at in places])
        timed(f"{name}: release", [lambda h=h: release(h) for h in handles])
    # The mapping keeps the memory: does it cost less to release the handle at once?
    timed(f"{name}: create", [lambda h=h: create(h, PIECE) for h in handles])
    timed(f"{name}: map", [lambda at=at, h=h: map_at(at, PIECE, h) for at, h in zip(places, handles)])
    timed(f"{name}: release of what is mapped", [lambda h=h: release(h) for h in handles])
    timed(f"{name}: access, 16 at once", [lambda r=r: access(min(r), len(r) * PIECE) for r in runs(places, 16)], 16)
    timed(f"{name}: unmap of what has no handle, 16 at once", [lambda r=r: unmap(min(r), len(r) * PIECE) for r in runs(places, 16)], 16)


call("cuInit", 0)
context, stream = c_void_p(), c_void_p()
call("cuDevicePrimaryCtxRetain", byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuStreamCreate", byref(stream), 1)
alone = [c_uint64() for _ in range(COUNT)]
timed("reserve, each by itself", [lambda p=p: reserve(p, PIECE) for p in alone])
steps = [later.value - earlier.value for earlier, later in zip(alone, alone[1:])]
print("steps between one reservation and the next, in pieces:", {step / PIECE: steps.count(step) for step in sorted(set(steps))})
places = sorted(p.value for p in alone)
gaps = sum(later - earlier != PIECE for earlier, later in zip(places, places[1:]))
print("gaps between neighbours:", gaps)
moves("each by itself", places)
whole = c_uint64()
reserve(whole, COUNT * PIECE)
moves("one reservation", [whole.value + i * PIECE for i in range(COUNT)])
for size in (32, 128):
    some = range(0, COUNT * PIECE, size << 20)
    handles = [c_uint64() for _ in some]
    timed(f"{size} MiB: create", [lambda h=h: create(h, size << 20) for h in handles])
    timed(f"{size} MiB: map", [lambda at=at, h=h: map_at(whole.value + at, size << 20, h) for at, h in zip(some, handles)])
    timed(f"{size} MiB: access", [lambda at=at: access(whole.value + at, size << 20) for at in some])
    if size == 128:
        host = c_void_p()
        call("cuMemHostAlloc", byref(host), c_size_t(COUNT * PIECE), 0)
        copies = [lambda i=i: call("cuMemcpyDtoHAsync_v2", c_void_p(host.value + i * PIECE), c_uint64(whole.value + i * PIECE), c_size_t(PIECE), stream) for i in range(min(COUNT, 48))]
        timed("submit a copy of 2 MiB to the host", copies)
        timed("wait for these 48", [lambda: call("cuStreamSynchronize", stream)], 48)
        events = [c_void_p() for _ in range(1000)]
        timed("event: create", [lambda e=e: call("cuEventCreate", byref(e), 2) for e in events])
        timed("event: record", [lambda e=e: call("cuEventRecord", e, stream) for e in events])
        timed("event: query", [lambda e=e: call("cuEventQuery", e) for e in events])
        timed("event: destroy", [lambda e=e: call("cuEventDestroy_v2", e) for e in events])
        timed("context: event of all work", [lambda e=c_void_p(): call("cuEventCreate", byref(e), 2) or call("cuCtxRecordEvent", context, e) for _ in range(1000)])
        timed("context: push and pop", [lambda: call("cuCtxPushCurrent_v2", context) or call("cuCtxPopCurrent_v2", byref(c_void_p())) for _ in range(1000)])
        timed("capture mode: exchange", [lambda m=c_int(2): call("cuThreadExchangeStreamCaptureMode", byref(m)) for _ in range(1000)])
    timed(f"{size} MiB: unmap", [lambda at=at: unmap(whole.value + at, size << 20) for at in some])
    timed(f"{size} MiB: release", [lambda h=h: release(h) for h in handles])
timed("free the addresses, each by itself", [lambda at=at: call("cuMemAddressFree", c_uint64(at), c_size_t(PIECE)) for at in places])
for mib in (2, 20, 128):
    pointer = c_uint64()
    both = lambda: call("cuMemAlloc_v2", byref(pointer), c_size_t(mib << 20)) or call("cuMemFree_v2", pointer)
    timed(f"{mib} MiB: the driver's allocation and free", [both] * 200)
