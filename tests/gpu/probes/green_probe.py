#!/usr/bin/env python3
"""What is left of memory that was made while a green context was current, when that context has ended. Without nvshare."""
import ctypes as C

driver = C.CDLL("libcuda.so.1")
P, U, S = C.c_void_p, C.c_ulonglong, C.c_size_t


def call(name, *arguments):
    answer = getattr(driver, name)(*arguments)
    print(f"  {name}: {answer}")
    return answer


def free_mib():
    left, total = S(), S()
    driver.cuMemGetInfo_v2(C.byref(left), C.byref(total))
    return left.value >> 20


class Shape(C.Structure):
    _fields_ = [("width", S), ("height", S), ("format", C.c_int), ("channels", C.c_uint)]


def main():
    device, primary = C.c_int(), P()
    call("cuInit", 0), call("cuDeviceGet", C.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", C.byref(primary), device), call("cuCtxSetCurrent", primary)
    for _ in range(2):
        resource, description, green, derived = C.create_string_buffer(512), P(), P(), P()
        call("cuDeviceGetDevResource", device, resource, 1), call("cuDevResourceGenerateDesc", C.byref(description), resource, 1)
        call("cuGreenCtxCreate", C.byref(green), description, device, 1), call("cuCtxFromGreenCtx", C.byref(derived), green)
        call("cuCtxSetCurrent", derived)
        before = free_mib()
        array, managed, stream, ordered, host, plain = P(), U(), P(), U(), P(), U()
        call("cuArrayCreate_v2", C.byref(array), C.byref(Shape(8192, 8192, 0x20, 4)))
        call("cuMemAllocManaged", C.byref(managed), S(64 << 20), 1), call("cuMemAlloc_v2", C.byref(plain), S(64 << 20))
        for memory in (managed, plain):
            call("cuMemsetD8_v2", memory, C.c_ubyte(7), S(64 << 20))
        call("cuStreamCreate", C.byref(stream), 1), call("cuMemAllocAsync", C.byref(ordered), S(64 << 20), stream), call("cuStreamSynchronize", stream)
        call("cuMemHostAlloc", C.byref(host), S(1 << 20), 0)
        call("cuGreenCtxDestroy", green), call("cuCtxSetCurrent", primary)
        print(f"the green context has ended: {before - free_mib()} MiB less are free")
        seen, shape, flags = C.create_string_buffer(4), Shape(), C.c_uint()
        for what, memory in (("managed", managed), ("plain", plain)):
            call("cuMemcpyDtoH_v2", seen, memory, S(4))
            print(f"{what}: {seen.raw}")
        call("cuArrayGetDescriptor_v2", C.byref(shape), array), call("cuMemsetD8_v2", ordered, C.c_ubyte(7), S(64 << 20)), call("cuMemHostGetFlags", C.byref(flags), host)
        call("cuArrayDestroy", array), call("cuMemFreeHost", host), [call("cuMemFree_v2", memory) for memory in (managed, plain, ordered)]
        print(f"all is freed: {before - free_mib()} MiB less are free")


main()
