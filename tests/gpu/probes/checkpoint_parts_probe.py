#!/usr/bin/env python3
"""Where the time goes in which the driver takes a process off the card and brings it back: by limits of the context, by channels, by what the kernel is asked.

usage: checkpoint_parts_probe.py [CASE...]      each case is a process of its own; one line of JSON for each. Without nvshare; CUDA 12.8 or later.
"""
import collections, ctypes, json, os, statistics, subprocess, sys, threading, time
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

driver = ctypes.CDLL("libcuda.so.1")
STACK, PRINTF, HEAP = 0, 1, 2
# Name: environment, limits of the context, the framework.
CASES = {
    "context": ({}, {}, ""),
    "context, small limits": ({}, {STACK: 0, PRINTF: 0, HEAP: 0}, ""),
    "context, one connection": ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {}, ""),
    "torch": ({}, {}, "torch"),
    "torch, small limits": ({}, {STACK: 0, PRINTF: 0, HEAP: 0}, "torch"),
    "torch, one connection": ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {}, "torch"),
    "torch, one connection, small limits": ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {STACK: 0, PRINTF: 0, HEAP: 0}, "torch"),
}


def used():
    ask = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True)
    return int(ask.stdout.split()[0])


def sampled(tid, stop, seen):
    """Looks at what a thread is in, each ms: the number of its system call, and the kernel's number of an ioctl."""
    while not stop.is_set():
        try:
            words = open(f"/proc/self/task/{tid}/syscall").read().split()
        except OSError as error:
            words = [str(error)]
        seen["ioctl " + words[2] if words[0] == "16" else words[0]] += 1
        time.sleep(0.001)


def step(name, words=(0,) * 8):
    arguments, seen, stop = (c_uint64 * 8)(*words), collections.Counter(), threading.Event()
    looker = threading.Thread(target=sampled, args=(threading.get_native_id(), stop, seen))
    looker.start()
    begin = time.perf_counter()
    answer = getattr(driver, f"cuCheckpointProcess{name}")(c_int(os.getpid()), arguments)
    took = time.perf_counter() - begin
    stop.set(), looker.join()
    return answer, took, seen


def one(limits, framework):
    made = c_void_p()
    if framework:
        import torch
        a = torch.randn(1024, 1024, device="cuda")
        (a @ a).sum().item()
        torch.cuda.empty_cache()
    else:
        driver.cuInit(0), driver.cuDevicePrimaryCtxRetain(byref(made), 0), driver.cuCtxSetCurrent(made)
    answers = []
    before = used()
    for limit, value in limits.items():
        size = c_size_t()
        driver.cuCtxGetLimit(byref(size), limit)
        answers.append((limit, size.value, driver.cuCtxSetLimit(limit, c_size_t(value))))
    driver.cuCtxSynchronize()
    result = dict(limits=answers, used=before, with_limits=used())
    times, seen = collections.defaultdict(list), collections.defaultdict(collections.Counter)
    for _ in range(6):
        for name, words in (("Lock", (10_000, 0, 0, 0, 0, 0, 0, 0)), ("Checkpoint", (0,) * 8), ("Restore", (0,) * 8), ("Unlock", (0,) * 8)):
            answer, took, what = step(name, words)
            times[name].append(round(took, 3))
            seen[name] += what
            if answer:
                result[name] = answer
        time.sleep(0.1)
    return dict(result, times=times, seen={name: what.most_common(5) for name, what in seen.items() if name in ("Checkpoint", "Restore")})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--only"]:
        print(json.dumps(dict(case=sys.argv[2], **one(*CASES[sys.argv[2]][1:]))), flush=True)
    else:
        for name in sys.argv[1:] or CASES:
            ended = subprocess.run([sys.executable, __file__, "--only", name], env=dict(os.environ, **CASES[name][0]), capture_output=True, text=True, timeout=120)
            print(ended.stdout.strip() or f"{name}: {ended.returncode} {ended.stderr[-400:]}", flush=True)
