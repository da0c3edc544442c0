#!/usr/bin/env python3
"""Programs that a thread of their own takes off the card by the driver's checkpoint, and brings back: what holds, how long it takes, what stays on the card.

usage: sleep_within_probe.py [CASE...]      each case is a process of its own; one line of JSON for each. Without nvshare; CUDA 12.8 or later.
"""
import ctypes, json, os, signal, subprocess, sys, tempfile, threading, time
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

MIB, GIB = 1 << 20, 1 << 30
driver = ctypes.CDLL("libcuda.so.1")
FRAMEWORKS = ["torch", "jax", "cupy", "triton"]
CASES = [*FRAMEWORKS, "torch-as-nobody", "waits-in-synchronize", "in-a-callback", "calls-while-locked", "calls-while-asleep", "exportable",
         "pinned-24", "exits-asleep", "killed-asleep", "neighbour", "many"]


def used():
    """MiB that the card shows as used, and MiB of each process."""
    ask = lambda *what: subprocess.run(["nvidia-smi", *what, "--format=csv,noheader,nounits"], capture_output=True, text=True).stdout
    return int(ask("--query-gpu=memory.used").split()[0])


def step(name, words=(0,) * 8):
    arguments = (c_uint64 * 8)(*words)
    begin = time.perf_counter()
    answer = getattr(driver, f"cuCheckpointProcess{name}")(c_int(os.getpid()), arguments)
    return answer, round(time.perf_counter() - begin, 4)


def sleep_and_wake(asleep=0.1, meanwhile=lambda: None):
    """One cycle: the four answers with their seconds, and MiB on the card before, asleep, after."""
    seen = dict(before=used(), lock=step("Lock", (10_000, 0, 0, 0, 0, 0, 0, 0)))
    if seen["lock"][0]:
        return seen
    seen["checkpoint"] = step("Checkpoint")
    if seen["checkpoint"][0] == 0:
        seen["asleep"] = used()
        meanwhile()
        time.sleep(asleep)
        seen["restore"] = step("Restore")
    seen["unlock"] = step("Unlock")
    seen["after"] = used()
    return seen


def on_a_thread(work):
    """What `work` returns on a thread of its own, as the library's would."""
    result = []
    thread = threading.Thread(target=lambda: result.append(work()))
    thread.start()
    thread.join()
    return result[0] if result else "the thread failed"


def cycles(check, count=10):
    """Cycles with a check after each. The worst times and whether all was right."""
    seen, right = [], check()
    for _ in range(count):
        seen.append(on_a_thread(sleep_and_wake))
        right = check() and right
    worst = {name: max(s[name][1] for s in seen if name in s) for name in ("lock", "checkpoint", "restore", "unlock") if any(name in s for s in seen)}
    answers = sorted({(name, s[name][0]) for s in seen for name in ("lock", "checkpoint", "restore", "unlock") if name in s})
    return dict(right=right, answers=answers, worst=worst, before=seen[0]["before"], asleep=sorted({s.get("asleep") for s in seen}, key=str), after=seen[-1].get("after"))


def torch_program():
    import torch
    words = torch.arange(1 << 27, dtype=torch.int64, device="cuda")
    total = int(words.sum())
    one = torch.randn(1024, 1024, device="cuda")
    product = (one @ one).sum()
    state, graph, stream = torch.zeros(1024, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        state.add_(1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        state.add_(1)
    replays = [float(state[0])]

    def check():
        graph.replay()
        torch.cuda.synchronize()
        replays.append(float(state[0]))
        return int(words.sum()) == total and bool((one @ one).sum() == product) and replays[-1] == replays[-2] + 1

    return cycles(check)


def jax_program():
    import jax, jax.numpy as jnp
    one = jnp.arange(1 << 26, dtype=jnp.int32)
    square = jnp.ones((1024, 1024), dtype=jnp.float32)
    work = jax.jit(lambda a, b: (a.sum(dtype=jnp.int32), (b @ b).sum()))
    want = [float(x) for x in work(one, square)]
    return cycles(lambda: [float(x) for x in work(one, square)] == want)


def cupy_program():
    import cupy
    one, square = cupy.arange(1 << 26), cupy.ones((1024, 1024), dtype=cupy.float32)
    want = (int(one.sum()), float((square @ square).sum()))
    return cycles(lambda: (int(one.sum()), float((square @ square).sum())) == want)


def triton_program():
    import torch, triton, triton.language as tl
    source = """
import triton, triton.language as tl
@triton.jit
def twice(x, y, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)
"""
    path = os.path.join(tempfile.mkdtemp(), "twice.py")
    open(path, "w").write(source)
    sys.path.insert(0, os.path.dirname(path))
    from twice import twice
    one = torch.arange(1 << 24, device="cuda")

    def check():
        other = torch.empty_like(one)
        twice[(one.numel() // 1024,)](one, other, one.numel(), B=1024)
        return bool((other == 2 * one).all())

    return cycles(check)


def must(name, *arguments):
    if answer := getattr(driver, name)(*arguments):
        raise SystemExit(f"{name}: {answer}")


def context():
    made = c_void_p()
    must("cuInit", 0)
    must("cuDevicePrimaryCtxRetain", byref(made), 0)
    must("cuCtxSetCurrent", made)
    return made


def waits_in_synchronize():
    import torch
    torch.cuda.init()
    spin = 2_000_000_000
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    torch.cuda._sleep(spin)
    done = []
    waiter = threading.Thread(target=lambda: (torch.cuda.synchronize(), done.append(time.perf_counter())))
    begin = time.perf_counter()
    waiter.start()
    time.sleep(0.05)
    seen = on_a_thread(sleep_and_wake)
    waiter.join()
    return dict(seen, waiter_returned_after=round(done[0] - begin, 3), right=bool((torch.ones(8, device="cuda") * 2 == 2).all()))


def in_a_callback():
    owner = context()
    stream, done = c_void_p(), []
    must("cuStreamCreate", byref(stream), 1)
    host_function = ctypes.CFUNCTYPE(None, c_void_p)
    callback = host_function(lambda _: (time.sleep(1), done.append(time.perf_counter())))
    begin = time.perf_counter()
    must("cuLaunchHostFunc", stream, callback, None)
    time.sleep(0.05)
    seen = on_a_thread(sleep_and_wake)
    must("cuCtxSetCurrent", owner)
    must("cuStreamSynchronize", stream)
    return dict(seen, callback_ended_after=round(done[0] - begin, 3))


CALLS = ["cuMemGetInfo_v2", "cuMemAlloc_v2", "cuCtxSynchronize", "cuMemsetD8_v2", "cuMemcpyDtoH_v2", "cuDriverGetVersion", "cuCtxGetCurrent", "cuLaunchHostFunc", "cuStreamQuery",
         "cuEventQuery", "cuMemFree_v2", "cuDeviceGetAttribute", "cuPointerGetAttribute", "cuStreamCreate", "cuMemHostAlloc"]


def each_while_asleep():
    """Each call in a process of its own, as some end the process."""
    said = {}
    for name in CALLS:
        ran = subprocess.run([sys.executable, __file__, "--child", "calls-asleep", name], capture_output=True, text=True, timeout=60)
        said[name] = ran.stdout.strip() or f"exit {ran.returncode}"
    return said


def calls(at, wanted=tuple(CALLS[:7])):
    """Another thread calls while the process is locked, or asleep: the answers, and how long each call took."""
    owner = context()
    place = c_uint64()
    must("cuMemAlloc_v2", byref(place), c_size_t(64 * MIB))
    said = []

    def call(name, *arguments):
        def work():
            driver.cuCtxSetCurrent(owner)
            begin = time.perf_counter()
            answer = getattr(driver, name)(*arguments)
            said.append((name, answer, round(time.perf_counter() - begin, 3)))
        thread = threading.Thread(target=work)
        thread.start()
        return thread

    free, total, other, version = c_size_t(), c_size_t(), c_uint64(), c_int()
    host, stream, event = (ctypes.c_char * 4096)(), c_void_p(), c_void_p()
    must("cuStreamCreate", byref(stream), 1)
    must("cuEventCreate", byref(event), 0)
    nothing = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: None)
    arguments = {
        "cuMemGetInfo_v2": (byref(free), byref(total)), "cuMemAlloc_v2": (byref(other), c_size_t(MIB)), "cuCtxSynchronize": (), "cuMemsetD8_v2": (place, ctypes.c_ubyte(1), c_size_t(4096)),
        "cuMemcpyDtoH_v2": (host, place, c_size_t(4096)), "cuDriverGetVersion": (byref(version),), "cuCtxGetCurrent": (byref(c_void_p()),), "cuLaunchHostFunc": (stream, nothing, None),
        "cuStreamQuery": (stream,), "cuEventQuery": (event,), "cuMemFree_v2": (place,), "cuDeviceGetAttribute": (byref(version), 16, 0),
        "cuPointerGetAttribute": (byref(other), 2, place), "cuStreamCreate": (byref(c_void_p()), 1), "cuMemHostAlloc": (byref(c_void_p()), c_size_t(MIB), 0),
    }
    begun = lambda: [call(name, *arguments[name]) for name in wanted]
    if at == "asleep":
        threads = []
        seen = sleep_and_wake(0.5, lambda: threads.extend(begun()))
    else:
        seen = dict(lock=step("Lock", (10_000, 0, 0, 0, 0, 0, 0, 0)))
        threads = begun()
        time.sleep(0.5)
        seen["said while locked"] = list(said)
        seen["checkpoint"] = step("Checkpoint")
        seen["restore"] = step("Restore") if seen["checkpoint"][0] == 0 else None
        seen["unlock"] = step("Unlock")
    for thread in threads:
        thread.join(10)
    return dict(seen, said=said, hang=any(thread.is_alive() for thread in threads), after=driver.cuMemGetInfo_v2(byref(free), byref(total)))


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""
    _fields_ = [("type", c_int), ("handles", c_int), ("place", c_int * 2), ("win32", c_void_p), ("flags", ctypes.c_ubyte * 8)]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""
    _fields_ = [("place", c_int * 2), ("flags", c_int)]


def exportable():
    """Memory by cuMemCreate with a handle type, first never exported, then exported."""
    context()
    handle, place, descriptor = c_uint64(), c_uint64(), c_int()
    properties = Properties(1, 1, (c_int * 2)(1, 0))
    must("cuMemCreate", byref(handle), c_size_t(64 * MIB), byref(properties), c_uint64(0))
    must("cuMemAddressReserve", byref(place), c_size_t(64 * MIB), c_size_t(0), c_uint64(0), c_uint64(0))
    must("cuMemMap", place, c_size_t(64 * MIB), c_size_t(0), handle, c_uint64(0))
    must("cuMemSetAccess", place, c_size_t(64 * MIB), byref(Access((c_int * 2)(1, 0), 3)), c_size_t(1))
    must("cuMemsetD8_v2", place, ctypes.c_ubyte(7), c_size_t(64 * MIB))
    must("cuCtxSynchronize")
    first = on_a_thread(sleep_and_wake)
    must("cuMemExportToShareableHandle", byref(descriptor), handle, 1, c_uint64(0))
    exported = on_a_thread(sleep_and_wake)
    os.close(descriptor.value)
    closed = on_a_thread(sleep_and_wake)
    host = (ctypes.c_ubyte * 4096)()
    answer = driver.cuMemcpyDtoH_v2(host, place, c_size_t(4096))
    return dict(never_exported=first, exported=exported, descriptor_closed=closed, right=answer == 0 and set(host) == {7})


def pinned(gib):
    context()
    place = c_void_p()
    must("cuMemHostAlloc", byref(place), c_size_t(gib * GIB), 0)
    return [on_a_thread(sleep_and_wake) for _ in range(3)]


def ends_asleep(how):
    """A child goes to sleep with 1 GiB and ends there; MiB on the card before it, asleep, and after its end."""
    before = used()
    child = subprocess.Popen([sys.executable, __file__, "--child", "sleeper"], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    asleep = child.stdout.readline().strip()
    begin = time.perf_counter()
    if how == "kill":
        child.send_signal(signal.SIGKILL)
    else:
        child.stdin.write("end\n")
        child.stdin.flush()
    try:
        code = child.wait(20)
    except subprocess.TimeoutExpired:
        code = "it hung"
        child.kill()
    time.sleep(0.5)
    return dict(before=before, child=asleep, ended_after=round(time.perf_counter() - begin - 0.5, 3), code=code, after=used())


def sleeper():
    context()
    place = c_uint64()
    must("cuMemAlloc_v2", byref(place), c_size_t(GIB))
    answers = [step("Lock", (10_000, 0, 0, 0, 0, 0, 0, 0)), step("Checkpoint")]
    print(json.dumps(dict(answers=answers, used=used())), flush=True)
    sys.stdin.readline()


def cycler():
    """Sleeps and wakes until its input ends."""
    context()
    place = c_uint64()
    must("cuMemAlloc_v2", byref(place), c_size_t(256 * MIB))
    print("ready", flush=True)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), ended.set()), daemon=True).start()
    count = 0
    while not ended.is_set():
        if any(step(name, (10_000 if name == "Lock" else 0, *(0,) * 7))[0] for name in ("Lock", "Checkpoint", "Restore", "Unlock")):
            break
        count += 1
    print(count, flush=True)


def neighbour():
    """Steps of a program beside one that sleeps and wakes all the time; and beside one that does nothing."""
    import torch
    one = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def steps(seconds):
        times, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end:
            begin = time.perf_counter()
            for _ in range(10):
                one @ one
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
        times.sort()
        return dict(steps=len(times), mean=round(sum(times) / len(times), 3), median=round(times[len(times) // 2], 3), p99=round(times[int(len(times) * 0.99)], 3), worst=round(times[-1], 1))

    steps(1)
    alone = steps(5)
    child = subprocess.Popen([sys.executable, __file__, "--child", "cycler"], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    child.stdout.readline()
    beside = steps(5)
    child.stdin.write("end\n")
    child.stdin.flush()
    count = child.stdout.readline().strip()
    child.wait(10)
    return dict(alone=alone, beside=beside, cycles=count, alone_again=steps(3))


def many(count=24):
    """MiB on the card for each of several programs with a context and 64 MiB, awake and asleep."""
    before, children, each = used(), [], []
    for _ in range(count):
        child = subprocess.Popen([sys.executable, __file__, "--child", "sleeper-of-many"], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
        each.append(child.stdout.readline().strip())
        children.append(child)
    awake = used()
    for child in children:
        child.stdin.write("sleep\n")
        child.stdin.flush()
        child.stdout.readline()
    asleep = used()
    begin = time.perf_counter()
    for child in children:
        child.stdin.write("wake\n")
        child.stdin.flush()
    answers = {child.stdout.readline().strip() for child in children}
    woken = time.perf_counter() - begin
    for child in children:
        child.stdin.close()
        child.wait(20)
    return dict(programs=count, before=before, awake=awake, asleep=asleep, all_woken_at_once_after=round(woken, 2), answers=sorted(answers), after=used())


def sleeper_of_many():
    context()
    place = c_uint64()
    must("cuMemAlloc_v2", byref(place), c_size_t(64 * MIB))
    print("ready", flush=True)
    for names in (("Lock", "Checkpoint"), ("Restore", "Unlock")):
        sys.stdin.readline()
        print([step(name, (60_000 if name == "Lock" else 0, *(0,) * 7))[0] for name in names], flush=True)


WORK = {
    "torch": torch_program, "torch-as-nobody": torch_program, "jax": jax_program, "cupy": cupy_program, "triton": triton_program,
    "waits-in-synchronize": waits_in_synchronize, "in-a-callback": in_a_callback,
    "calls-while-locked": lambda: calls("locked"), "calls-while-asleep": each_while_asleep, "exportable": exportable,
    "pinned-24": lambda: pinned(24), "exits-asleep": lambda: ends_asleep("exit"), "killed-asleep": lambda: ends_asleep("kill"),
    "neighbour": neighbour, "many": many,
}


def main():
    if sys.argv[1:2] == ["--child"]:
        if sys.argv[2] == "calls-asleep":
            seen = calls("asleep", sys.argv[3:])
            return print(json.dumps(dict(said=seen["said"], hang=seen["hang"], restore=seen.get("restore"), unlock=seen.get("unlock"), after=seen["after"])), flush=True)
        return {"sleeper": sleeper, "cycler": cycler, "sleeper-of-many": sleeper_of_many}[sys.argv[2]]()
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(WORK[sys.argv[2]](), default=str), flush=True)
        os._exit(0)
    for case in sys.argv[1:] or CASES:
        command = [sys.executable, os.path.abspath(__file__), "--case", case]
        environment = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false")
        if case.endswith("as-nobody"):
            command = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all", *command]
            environment |= dict(HOME="/tmp", TRITON_CACHE_DIR="/tmp/nobody-triton", TORCHINDUCTOR_CACHE_DIR="/tmp/nobody-inductor", USER="nobody", LOGNAME="nobody")
        begin = time.perf_counter()
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=70, env=environment)
            said = ran.stdout.strip().splitlines()[-1:] or [f"exit {ran.returncode}: {ran.stderr[-400:]}"]
        except subprocess.TimeoutExpired as late:
            said = [f"no end after 70 s: {(late.stderr or b'')[-400:]}"]
        print(f"{case} ({time.perf_counter() - begin:.0f} s): {said[0]}", flush=True)


if __name__ == "__main__":
    main()
