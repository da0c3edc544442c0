#!/usr/bin/env python3
"""What the driver answers about memory that a program creates and maps itself: what the library's books answer while it is away.

On an H200, driver 580.159.04: a handle is an address of the host. Mapping it in part, from an offset, or beyond its size is
NOT_SUPPORTED (801); at an address that is taken, or no multiple of 2 MiB, INVALID_VALUE; twice, fine. Access, also to read
alone (1), is set for whole mappings. Addresses with mappings are not freed. RANGE_START_ADDR and RANGE_SIZE are those of the
reserved addresses, MAPPING_BASE_ADDR and MAPPING_SIZE, and cuMemGetAddressRange, those of the mapping; CONTEXT is null.
"""
from ctypes import CDLL, byref, c_int, c_size_t, c_uint64, c_void_p

DRIVER, MIB = CDLL("libcuda.so.1"), 1 << 20
ON_CARD = (c_int * 8)(1, 0, 1, 0, 0, 0, 0, 0)


def call(name, *arguments):
    return getattr(DRIVER, name)(*arguments)


def create(size):
    handle = c_uint64()
    return call("cuMemCreate", byref(handle), c_size_t(size), ON_CARD, c_uint64(0)), handle


def map_at(at, size, offset, handle):
    return call("cuMemMap", c_uint64(at), c_size_t(size), c_size_t(offset), handle, c_uint64(0))


def access(at, size, flags=3):
    return call("cuMemSetAccess", c_uint64(at), c_size_t(size), (c_int * 3)(1, 0, flags), c_size_t(1))


def unmap(at, size):
    return call("cuMemUnmap", c_uint64(at), c_size_t(size))


call("cuInit", 0)
context = c_void_p()
call("cuDevicePrimaryCtxRetain", byref(context), 0)
call("cuCtxSetCurrent", context)
result, handle = create(8 * MIB)
print("create", result, hex(handle.value), "of 3 MiB", create(3 * MIB)[0], "of nothing", create(0)[0])
place = c_uint64()
call("cuMemAddressReserve", byref(place), c_size_t(64 * MIB), c_size_t(0), c_uint64(0), c_uint64(0))
a = place.value
print("map", map_at(a, 8 * MIB, 0, handle), "again", map_at(a, 8 * MIB, 0, handle), "overlapping", map_at(a + 4 * MIB, 8 * MIB, 0, handle),
      "twice", map_at(a + 8 * MIB, 8 * MIB, 0, handle), "half", map_at(a + 16 * MIB, 4 * MIB, 0, handle),
      "from an offset", map_at(a + 20 * MIB, 4 * MIB, 4 * MIB, handle), "more", map_at(a + 32 * MIB, 16 * MIB, 0, handle),
      "at an odd address", map_at(a + 49 * MIB, 8 * MIB, 0, handle))
print("access to a part", access(a, 4 * MIB), "to one", access(a, 8 * MIB), "to both", access(a, 16 * MIB), "to a gap", access(a, 64 * MIB),
      "to read", access(a, 8 * MIB, 1), "flags 2", access(a, 8 * MIB, 2), "none", access(a, 8 * MIB, 0), "again", access(a, 16 * MIB))
again, properties = c_uint64(), (c_int * 8)()
print("retain", call("cuMemRetainAllocationHandle", byref(again), c_uint64(a + 9 * MIB)), again.value == handle.value,
      "free the addresses", call("cuMemAddressFree", c_uint64(a), c_size_t(64 * MIB)),
      "properties", call("cuMemGetAllocationPropertiesFromHandle", properties, handle), list(properties))
print("unmap a part", unmap(a, 4 * MIB), "with a gap", unmap(a, 64 * MIB))
for attribute in range(1, 22):
    value = (c_uint64 * 8)()
    print("attribute", attribute, call("cuPointerGetAttribute", value, attribute, c_uint64(a + 9 * MIB)), hex(value[0]))
base, size = c_uint64(), c_size_t()
print("address range", call("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(a + 9 * MIB)), base.value - a, size.value)
print("release", call("cuMemRelease", again), call("cuMemRelease", handle), "unmap both", unmap(a, 16 * MIB))
