#!/usr/bin/env python3
"""Can a process checkpoint itself on one GPU and restore itself on another (gpuPairs), and what is then where? Each case is a process without the library. gpu_pairs_probe.py
Needs two GPUs of one kind. `swapped`: both are visible and change places; `one`: only the first is visible; `half`: both are visible, one pair is given; `vmm`: the memory is made by cuMemCreate; `both`: the process has memory on both."""
import ctypes as C, os, subprocess, sys, time
source = open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "checkpoint_things_probe.py")).read().split("def base(p)")[0]
exec(source)
MIB = 1 << 20
def uuids():
    out = subprocess.run(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, text=True).stdout.split()
    return [bytes.fromhex(u.replace("GPU-", "").replace("-", "")) for u in out]
def used():
    return [int(x) for x in subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True).stdout.split()]
def seen(device):
    u = (C.c_ubyte * 16)(); ok(D.cuDeviceGetUuid(u, device)); return bytes(u)
def pairs(*changes):
    data = C.create_string_buffer(b"".join(old + new for old, new in changes), 32 * len(changes))
    args = (C.c_uint64 * 8)(C.addressof(data), len(changes)); args.keep = data
    return args
def vmm(n):
    class Prop(C.Structure): _fields_ = [("type", C.c_int), ("handles", C.c_int), ("where", C.c_int), ("id", C.c_int), ("win", C.c_void_p), ("flags", C.c_ubyte * 8)]
    p = Prop(1, 0, 1, 0, None); h, a = C.c_uint64(), C.c_uint64()
    ok(D.cuMemCreate(C.byref(h), C.c_size_t(n), C.byref(p), C.c_uint64(0)), "create"); ok(D.cuMemAddressReserve(C.byref(a), C.c_size_t(n), C.c_size_t(0), C.c_uint64(0), C.c_uint64(0)), "reserve")
    ok(D.cuMemMap(a, C.c_size_t(n), C.c_size_t(0), h, C.c_uint64(0)), "map")
    access = (C.c_int * 3)(1, 0, 3); ok(D.cuMemSetAccess(a, C.c_size_t(n), access, C.c_size_t(1)), "access"); return a.value
def case(name):
    all_uuids, n = uuids(), 256 * MIB
    ok(D.cuInit(0)); count = C.c_int(); ok(D.cuDeviceGetCount(C.byref(count)))
    ctx = C.c_void_p(); ok(D.cuDevicePrimaryCtxRetain(C.byref(ctx), 0)); ok(D.cuCtxSetCurrent(ctx))
    p = vmm(n) if name == "vmm" else alloc(n); ok(D.cuMemsetD32_v2(C.c_uint64(p), 77, C.c_size_t(n // 4))); m = load(); launch(m, p)
    if name == "both":
        other = C.c_void_p(); ok(D.cuDevicePrimaryCtxRetain(C.byref(other), 1)); ok(D.cuCtxSetCurrent(other)); alloc(512 * MIB); ok(D.cuCtxSetCurrent(ctx))
    a, b = all_uuids[:2]; said = [count.value, used()]
    for there, back in ((a, b), (b, a)):
        given = pairs((there, back)) if name in ("one", "half") else pairs((there, back), (back, there))
        begin = time.time(); answers = [step("Lock", 5000), step("Checkpoint")]; away = used(); mid = time.time()
        answers += [D.cuCheckpointProcessRestore(os.getpid(), given)]; took = time.time() - mid; answers += [step("Unlock")]
        said += [answers, f"out {mid - begin:.2f} s, in {took:.2f} s", away, used()]
        if any(answers):
            said += ["then without pairs", [step("Restore"), step("Unlock")]]; launch(m, p); words = (C.c_uint32 * 40)(); ok(D.cuMemcpyDtoH_v2(words, C.c_uint64(p), C.c_size_t(160)), "copy"); said += [f"words {words[0]} {words[31]} {words[32]}", used()]
            break
        launch(m, p); words = (C.c_uint32 * 40)(); ok(D.cuMemcpyDtoH_v2(words, C.c_uint64(p), C.c_size_t(160)), "copy")
        q = alloc(64 * MIB); f, t = C.c_size_t(), C.c_size_t(); ok(D.cuMemGetInfo_v2(C.byref(f), C.byref(t)))
        said += [f"device 0 is {all_uuids.index(seen(0))}", f"words {words[0]} {words[31]} {words[32]}", f"after 64 MiB more {used()}", f"free {f.value // MIB}"]
    print(name, *said, flush=True)
if len(sys.argv) > 1:
    case(sys.argv[1])
else:
    for name in ("swapped", "one", "half", "vmm", "both"):
        env = dict(os.environ, **({"CUDA_VISIBLE_DEVICES": "0"} if name == "one" else {}))
        try:
            ran = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, timeout=40, env=env); print(ran.stdout.strip() or f"{name} {ran.returncode} {ran.stderr[-300:]}", flush=True)
        except subprocess.TimeoutExpired: print(name, "hangs", flush=True)
