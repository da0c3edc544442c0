#!/usr/bin/env python3
"""Does work wait for a host function on another stream, after a checkpoint and a restore, or after the limit of stacks was set to 0 and back (`limits`)? wake_window_probe.py
Each case is a process without the library. The host function of one stream waits for the work of another; "waits" means that the work did not end before the host function did."""
import ctypes as C, os, subprocess, sys, threading, time
source = open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "checkpoint_things_probe.py")).read().split("CASES = [")[0]
exec(source)
def function(m):
    f = C.c_void_p(); ok(D.cuModuleGetFunction(C.byref(f), m, b"add"), "function"); return f
def start_launch(f, address, s):
    a, w = C.c_uint64(address), C.c_uint32(1); args = (C.c_void_p * 2)(C.addressof(a), C.addressof(w))
    ok(D.cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, s, args, None), "launch")
def cycle():
    answers = [step("Lock", 5000), step("Checkpoint"), step("Restore"), step("Unlock")]
    assert not any(answers), answers
def limits():
    was = C.c_size_t(); ok(D.cuCtxGetLimit(C.byref(was), 0)); ok(D.cuCtxSetLimit(0, C.c_size_t(0))); ok(D.cuCtxSetLimit(0, was))
KINDS = {"launch": lambda s: start_launch(fa, p, s), "fill": lambda s: ok(D.cuMemsetD32Async(C.c_uint64(p), 1, C.c_size_t(32), s)), "other launch": lambda s: start_launch(fb, p, s), "copy": lambda s: ok(D.cuMemcpyDtoDAsync_v2(C.c_uint64(p), C.c_uint64(q), C.c_size_t(64), s)), "copy out": lambda s: ok(D.cuMemcpyDtoHAsync_v2(C.create_string_buffer(64), C.c_uint64(q), C.c_size_t(64), s))}
HOLD = threading.Event()
@C.CFUNCTYPE(None, C.c_void_p)
def hold(data): HOLD.wait(20)
def window(kind, s, t):
    HOLD.clear(); ok(D.cuLaunchHostFunc(s, hold, None)); time.sleep(0.05)
    done, called = threading.Event(), threading.Event()
    def work(): ok(D.cuCtxSetCurrent(ctx)); KINDS[kind](t); called.set(); ok(D.cuStreamSynchronize(t)); done.set()
    thread = threading.Thread(target=work); thread.start()
    ended = done.wait(2); had = called.is_set(); HOLD.set(); thread.join(); ok(D.cuStreamSynchronize(s))
    return "goes on" if ended else "work waits" if had else "call waits"
BEFORE = {"limits": [limits], "limits, sync": [limits, "sync"], "limits, launch elsewhere": [limits, "elsewhere"], "limits, other kernel": [limits, "other elsewhere"], "limits, load": [limits, "load"], "limits, host function": [limits, "host"], "cycle, limits, other kernel": [cycle, limits, "other elsewhere"], "limits, blocking stream": [limits, "blocking"], "limits, null stream": [limits, "null"], "nothing": [], "cycle": [cycle], "limits, cycle": [limits, cycle], "cycle, launch": [cycle, "launch"]}
if len(sys.argv) > 1:
    before, kind = sys.argv[1:3]
    ok(D.cuInit(0)); ctx = C.c_void_p(); ok(D.cuDevicePrimaryCtxRetain(C.byref(ctx), 0)); ok(D.cuCtxSetCurrent(ctx))
    p, q = alloc(), alloc(); fa, fb = function(load()), function(load()); s, t, u = stream(), stream(), stream()
    for k in KINDS: KINDS[k](t); KINDS[k](s); KINDS[k](u)
    HOLD.set(); ok(D.cuLaunchHostFunc(s, hold, None)); ok(D.cuCtxSynchronize())
    for b in BEFORE[before]:
        if b == "sync": ok(D.cuCtxSynchronize())
        elif b == "load": ok(D.cuFuncLoad(fa), "load")
        elif b == "host": ok(D.cuLaunchHostFunc(u, hold, None)); ok(D.cuStreamSynchronize(u))
        elif b == "elsewhere": start_launch(fa, p, u); ok(D.cuStreamSynchronize(u))
        elif b == "other elsewhere": start_launch(fb, p, u); ok(D.cuStreamSynchronize(u))
        elif b == "blocking": n = C.c_void_p(); ok(D.cuStreamCreate(C.byref(n), 0)); start_launch(fb, p, n); ok(D.cuStreamSynchronize(n)); ok(D.cuStreamDestroy_v2(n))
        elif b == "null": start_launch(fb, p, None); ok(D.cuStreamSynchronize(None))
        elif isinstance(b, str): KINDS[b](t); ok(D.cuStreamSynchronize(t))
        else: b()
    first = window(kind, s, t)
    print(f"{before:28} {kind:13} {first:12} then {window(kind, s, t)}", flush=True)
else:
    jobs = [(b, k) for b in BEFORE for k in ("launch", "other launch", "fill")]
    def run(job):
        for env in [{}] + ([{"CUDA_MODULE_LOADING": "EAGER"}] if job == ("cycle", "launch") else []):
            try:
                d = subprocess.run([sys.executable, __file__, *job], capture_output=True, text=True, timeout=40, env=dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="32", **env))
                print(d.stdout.strip() or (job, d.stderr.strip()[-200:]), "eager" if env else "", flush=True)
            except subprocess.TimeoutExpired: print(job, "hangs", flush=True)
    todo = list(jobs)
    def worker():
        while todo: run(todo.pop(0))
    threads = [threading.Thread(target=worker) for _ in range(4)]; [x.start() for x in threads]; [x.join() for x in threads]
