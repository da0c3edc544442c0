#!/usr/bin/env python3
"""Which calls about page-locked memory wait for work in flight, and which calls of other threads wait for them. It needs no toolkit.

A host function holds a stream up for two seconds. Meanwhile one thread makes the call, and another makes a stream. A row each: how
long the call and the making of the stream took, in seconds.
"""
import ctypes, mmap, threading, time

cuda, MIB = ctypes.CDLL("libcuda.so.1"), 1 << 20
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def check(result):
    assert result == 0, result


def timed(call):
    begin = time.time()
    check(call())
    return round(time.time() - begin, 3)


def beside(name, call):
    """Times a call, and the making of a stream, beside a host function that lasts for two seconds."""
    check(cuda.cuLaunchHostFunc(stream, sleeps, None))
    time.sleep(0.2)
    took = {}

    def run(key, what, after):
        check(cuda.cuCtxSetCurrent(context))
        time.sleep(after)
        took[key] = timed(what)

    other = ctypes.c_void_p()
    threads = [threading.Thread(target=run, args=arguments) for arguments in [
        ("call", call, 0), ("stream", lambda: cuda.cuStreamCreate(ctypes.byref(other), 1), 0.3)]]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    check(cuda.cuCtxSynchronize())
    print(f"{name:24} call {took['call']:.3f}  a stream of another thread {took['stream']:.3f}", flush=True)


check(cuda.cuInit(0))
context, stream, version = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
check(cuda.cuCtxSetCurrent(context))
check(cuda.cuStreamCreate(ctypes.byref(stream), 1))
check(cuda.cuDriverGetVersion(ctypes.byref(version)))
print("driver", version.value)
sleeps = CALLBACK(lambda _: time.sleep(2))
memory = mmap.mmap(-1, 256 * MIB)
address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
pinned = ctypes.c_void_p()
beside("nothing", lambda: 0)
beside("cuMemHostRegister", lambda: cuda.cuMemHostRegister_v2(address, ctypes.c_size_t(256 * MIB), 0))
beside("cuMemHostUnregister", lambda: cuda.cuMemHostUnregister(address))
beside("cuMemHostAlloc", lambda: cuda.cuMemHostAlloc(ctypes.byref(pinned), ctypes.c_size_t(256 * MIB), 0))
beside("cuMemFreeHost", lambda: cuda.cuMemFreeHost(pinned))
