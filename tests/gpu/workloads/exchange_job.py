#!/usr/bin/env python3
"""GIB of device memory of random bytes in blocks of MIB, of which each pass changes one word in every 2 MiB, but for parts that are zero or stay as they
are; speaks the driver API itself. So all that changes has to be copied when it leaves, and a pass takes next to no time.

One JSON line at the end: passes, and how many bytes were read and were not what they must be (every one, at the end)."""
import argparse, ctypes, json, os, random, time
p = argparse.ArgumentParser(); p.add_argument("name"); p.add_argument("--gib", type=float, default=8); p.add_argument("--mib", type=int, default=256); p.add_argument("--seconds", type=float, default=12)
p.add_argument("--zeros", type=float, default=0, help="part of the blocks that is zero"); p.add_argument("--still", type=float, default=0, help="part that no pass changes")
a = p.parse_args()
cu, libc = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None); u64, size_t = ctypes.c_uint64, ctypes.c_size_t
libc.memcmp.argtypes = libc.memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, size_t]
def call(name, *args):
    r = getattr(cu, name)(*args)
    if r: raise SystemExit(f"{name}: CUDA error {r}")
PIECE = 2 << 20
n, each = int(a.gib * 1024 / a.mib), (a.mib << 20) // PIECE
zeros, still = round(n * a.zeros), round(n * a.still)
bytes_of = os.urandom((64 << 20) + PIECE); secret = ctypes.cast(bytes_of, ctypes.c_void_p).value
def place(i): return secret + i * 52096 % (64 << 20)  # where the first bytes of piece i are; no two of 8192 pieces begin alike
t0 = time.time()
ctx, stream = ctypes.c_void_p(), ctypes.c_void_p()
call("cuInit", 0); call("cuDevicePrimaryCtxRetain", ctypes.byref(ctx), 0); call("cuCtxSetCurrent", ctx); call("cuStreamCreate", ctypes.byref(stream), 1)
blocks = []
for i in range(n):
    b = u64(); call("cuMemAlloc_v2", ctypes.byref(b), size_t(a.mib << 20)); blocks.append(b.value)
    if i < zeros: call("cuMemsetD32Async", u64(blocks[i]), 0, size_t((a.mib << 20) // 4), stream)
    else:
        for k in range(each): call("cuMemcpyHtoD_v2", u64(blocks[i] + k * PIECE), ctypes.c_void_p(place(i * each + k)), size_t(PIECE))
call("cuStreamSynchronize", stream)
v, wrong, checked = 0, 0, 0
def change():
    for i in range(zeros + still, n): call("cuMemsetD2D32Async", u64(blocks[i]), size_t(PIECE), ctypes.c_uint((v * 1000003 + i) & 0xffffffff), size_t(1), size_t(each), stream)
    call("cuStreamSynchronize", stream)
expected, got, nothing = (ctypes.create_string_buffer(PIECE) for _ in range(3))
def check(piece):
    """Adds a piece whose bytes are not all what they must be to `wrong`."""
    global wrong, checked
    i, k = divmod(piece, each)
    call("cuMemcpyDtoH_v2", got, u64(blocks[i] + k * PIECE), size_t(PIECE))
    if i < zeros: want = nothing
    else:
        want = expected; libc.memmove(want, place(piece), PIECE)
        if i >= zeros + still and v: ctypes.c_uint32.from_buffer(want).value = (v * 1000003 + i) & 0xffffffff
    checked += PIECE
    if libc.memcmp(got, want, PIECE): wrong += sum(x != y for x, y in zip(got.raw, want.raw))
t1 = time.time()
if go := os.environ.get("GO"):
    open(f"{go}.{a.name}", "w").close()
    while not os.path.exists(go): time.sleep(0.002)
s, looked, some = time.time(), time.time(), random.Random(1)
while time.time() - s < a.seconds:
    v += 1; change()
    if time.time() - looked > 0.25: check(some.randrange(n * each)); looked = time.time()
end = time.time()
for piece in range(n * each): check(piece)
print(json.dumps(dict(name=a.name, gib=n * a.mib / 1024, mib=a.mib, blocks=n, setup_s=round(t1 - t0, 2), start=s, end=end, passes=v, checked_gib=round(checked / 2**30, 2), wrong_bytes=wrong)), flush=True)
