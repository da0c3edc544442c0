#!/usr/bin/env python3
"""How long the free of a row takes that no work has used, while a function of the host runs for 3 s on another stream: in the order of an idle stream, and by `cuMemFree`. Without nvshare."""
import ctypes as C, time

driver = C.CDLL("libcuda.so.1")
P, U, S = C.c_void_p, C.c_ulonglong, C.c_size_t
FUNCTION = C.CFUNCTYPE(None, P)(lambda _: time.sleep(3))


def call(name, *arguments):
    begin = time.time()
    answer = getattr(driver, name)(*arguments)
    print(f"  {name}: {answer} after {time.time() - begin:.3f} s")


device, context, busy, idle, memory = C.c_int(), P(), P(), P(), U()
call("cuInit", 0), call("cuDeviceGet", C.byref(device), 0), call("cuDevicePrimaryCtxRetain", C.byref(context), device), call("cuCtxSetCurrent", context)
call("cuStreamCreate", C.byref(busy), 1), call("cuStreamCreate", C.byref(idle), 1), call("cuMemAlloc_v2", C.byref(memory), S(1 << 20))
for way in ("cuMemFreeAsync", "cuMemFree_v2"):
    row, pitch = U(), S()
    call("cuLaunchHostFunc", busy, FUNCTION, None), call("cuMemsetD8Async", memory, C.c_ubyte(1), S(1 << 20), busy)
    call("cuMemAllocPitch_v2", C.byref(row), C.byref(pitch), S(5000), S(1), C.c_uint(4))
    call(way, row, *([idle] if way == "cuMemFreeAsync" else [])), call("cuCtxSynchronize")
