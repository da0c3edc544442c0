#!/usr/bin/env python3
"""cuda.core: NVIDIA's Python of the driver: programs compiled and linked, launches, streams, events, its resources of memory (of pools,
pinned, managed, virtual), graphs. What this version has not is said by name."""
import sys, program
program.need("cuda.core", "numpy")
try: from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch; import cuda.core as core
except ImportError: from cuda.core.experimental import Device, LaunchConfig, Program, ProgramOptions, launch; import cuda.core.experimental as core
import ctypes, numpy as np
from cuda.bindings import driver
seen = {}
device = Device(0); device.set_current(); stream = device.create_stream()
code = 'extern "C" __global__ void mix(unsigned* x, size_t n, unsigned salt) { size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; if (i < n) x[i] = x[i] * 1664525u + salt; }'
cc = "".join(map(str, device.compute_capability))
mix = Program(code, "c++", ProgramOptions(arch=f"sm_{cc}", std="c++17")).compile("cubin").get_kernel("mix")
N = 1 << 22
def words(buffer, n=N):
    host = np.zeros(n, np.uint32); stream.sync()
    assert not int(driver.cuMemcpyDtoH(host.ctypes.data, int(buffer.handle), 4 * n)[0]); return host
def use(buffer, n=N, salt=7):
    assert not int(driver.cuMemsetD32Async(int(buffer.handle), 3, n, stream.handle)[0])
    for k in range(10): launch(stream, LaunchConfig(grid=(n + 255) // 256, block=256), mix, int(buffer.handle), ctypes.c_uint64(n), ctypes.c_uint32(salt + k))
    got = words(buffer, n); want = 3
    for k in range(10): want = (want * 1664525 + salt + k) % 2**32
    return bool((got == want).all())
def plain(): b = device.allocate(4 * N, stream=stream); seen["allocate"] = use(b); b.close(stream)
def pool(): r = core.DeviceMemoryResource(0); b = r.allocate(4 * N, stream=stream); seen["pool"] = use(b), bool(b.is_device_accessible); b.close(stream)
def options():
    r = core.DeviceMemoryResource(0, core.DeviceMemoryResourceOptions(max_size=1 << 28)); bs = [r.allocate(4 * N, stream=stream) for _ in range(8)]
    seen["options"] = [use(b) for b in bs]
    try: r.allocate(1 << 29, stream=stream); seen["over the pool's size"] = "none"
    except Exception as e: seen["over the pool's size"] = type(e).__name__
    for b in bs: b.close(stream)
    a = r.attributes; stream.sync(); seen["attributes"] = a.used_mem_current, a.reserved_mem_current
def shared(): r = core.DeviceMemoryResource(0, core.DeviceMemoryResourceOptions(max_size=1 << 28, ipc_enabled=True)); b = r.allocate(4 * N, stream=stream); seen["shared"] = use(b), b.ipc_descriptor is not None; b.close(stream)
def pinned(): r = core.LegacyPinnedMemoryResource(); b = r.allocate(4 * N); seen["pinned"] = use(b); b.close()
def managed(): r = core.ManagedMemoryResource(); b = r.allocate(4 * N, stream=stream); seen["managed"] = use(b); b.close(stream)
def virtual(): r = core.VirtualMemoryResource(device); b = r.allocate(4 * N, stream=stream); seen["virtual"] = use(b); c = r.modify_allocation(b, 8 * N); seen["grown"] = use(c, 2 * N)
def copies(): a, b = (device.allocate(4 * N, stream=stream) for _ in range(2)); use(a); b.copy_from(a, stream=stream); seen["copies"] = bool((words(a) == words(b)).all())
def filled(): a = device.allocate(4 * N, stream=stream); a.fill(0x5a, stream=stream); seen["filled"] = bool((words(a) == 0x5a5a5a5a).all())
def events():
    b, other = device.allocate(4 * N, stream=stream), device.create_stream(); right = use(b); e = stream.record(); e.sync(); other.wait(e); other.sync(); seen["events"] = right, e.is_done
def graphs():
    b = device.allocate(4 * N, stream=stream); assert not int(driver.cuMemsetD32Async(int(b.handle), 0, N, stream.handle)[0]); g = device.create_graph_builder().begin_building()
    for k in range(5): launch(g, LaunchConfig(grid=N // 256, block=256), mix, int(b.handle), ctypes.c_uint64(N), ctypes.c_uint32(k))
    g.end_building(); graph = g.complete(); graph.upload(stream)
    for _ in range(3): graph.launch(stream)
    want = 0
    for k in list(range(5)) * 3: want = (want * 1664525 + k) % 2**32
    seen["graph"] = bool((words(b) == want).all())
def linked():
    o = [Program(c, "c++", ProgramOptions(arch=f"sm_{cc}", relocatable_device_code=True)).compile("cubin") for c in ('__device__ unsigned f(unsigned x) { return x * 3; }', 'extern __device__ unsigned f(unsigned); extern "C" __global__ void k(unsigned* x) { x[threadIdx.x] = f(threadIdx.x); }')]
    k = core.Linker(*o, options=core.LinkerOptions(arch=f"sm_{cc}")).link("cubin").get_kernel("k"); b = device.allocate(1024, stream=stream); launch(stream, LaunchConfig(grid=1, block=256), k, int(b.handle)); seen["linked"] = bool((words(b, 256) == 3 * np.arange(256)).all())
with program.work(stream.sync):
    for _ in range(program.steps(3)):
        for part in (plain, pool, options, shared, pinned, managed, virtual, copies, filled, events, graphs, linked):
            try: part()
            except Exception as error: seen[part.__name__] = f"{type(error).__name__}: {error}"[:90]
print(seen, file=sys.stderr)
program.tell(str(seen), ok=all(w is not False for v in seen.values() for w in (v if isinstance(v, (tuple, list)) else (v,))), seen={k: v for k, v in seen.items() if isinstance(v, str)})
