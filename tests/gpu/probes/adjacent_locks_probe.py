#!/usr/bin/env python3
"""Copies from and to two ranges of the host that lie side by side, and were page-locked one by one. Without nvshare."""
import ctypes as C, mmap

driver = C.CDLL("libcuda.so.1")
P, U, S = C.c_void_p, C.c_ulonglong, C.c_size_t
HALF = 2 << 20


def call(name, *arguments):
    print(f"  {name}: {getattr(driver, name)(*arguments)}")


device, context, stream, memory, host = C.c_int(), P(), P(), U(), mmap.mmap(-1, 2 * HALF)
at = C.addressof(C.c_char.from_buffer(host))
call("cuInit", 0), call("cuDeviceGet", C.byref(device), 0), call("cuDevicePrimaryCtxRetain", C.byref(context), device), call("cuCtxSetCurrent", context)
call("cuStreamCreate", C.byref(stream), 1), call("cuMemAlloc_v2", C.byref(memory), S(2 * HALF))
for half in range(2):
    call("cuMemHostRegister_v2", P(at + half * HALF), S(HALF), 1)
for what, begin in (("within one", at), ("across both", at + HALF // 2)):
    print(what)
    call("cuMemcpyDtoHAsync_v2", P(begin), memory, S(HALF), stream), call("cuMemcpyHtoDAsync_v2", memory, P(begin), S(HALF), stream), call("cuStreamSynchronize", stream)
