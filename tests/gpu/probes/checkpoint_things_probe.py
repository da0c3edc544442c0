#!/usr/bin/env python3
"""Does a process that has, or had, this or that come back from the driver's checkpoint? Each case is a process without the library, which locks, checkpoints, restores and unlocks itself three times. checkpoint_things_probe.py
One line for each: the four answers of each time, and the mappings of /dev/nvidia-uvm before."""
import ctypes as C, os, subprocess, sys
PTX = b""".version 7.0
.target sm_50
.address_size 64
.visible .entry add(.param .u64 p, .param .u32 w) {
 .reg .u64 %rd<4>; .reg .u32 %r<4>;
 ld.param.u64 %rd1, [p]; ld.param.u32 %r1, [w]; cvta.to.global.u64 %rd2, %rd1;
 mov.u32 %r2, %tid.x; mul.wide.u32 %rd3, %r2, 4; add.u64 %rd2, %rd2, %rd3;
 ld.global.u32 %r3, [%rd2]; add.u32 %r3, %r3, %r1; st.global.u32 [%rd2], %r3; ret; }
\0"""
D = C.CDLL("libcuda.so.1")
def ok(answer, what=""):
    assert answer == 0, (what, answer)
def step(name, first=0): return getattr(D, "cuCheckpointProcess" + name)(os.getpid(), (C.c_uint64 * 8)(first))
def u64(): return C.c_uint64(0)
def load():
    m = C.c_void_p(); ok(D.cuModuleLoadData(C.byref(m), PTX), "load"); return m
def launch(m, address, stream=None):
    f = C.c_void_p(); ok(D.cuModuleGetFunction(C.byref(f), m, b"add"), "function")
    a, w = C.c_uint64(address), C.c_uint32(1)
    args = (C.c_void_p * 2)(C.addressof(a), C.addressof(w))
    ok(D.cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, stream, args, None), "launch"); ok(D.cuCtxSynchronize(), "sync")
def alloc(n=4096):
    a = u64(); ok(D.cuMemAlloc_v2(C.byref(a), C.c_size_t(n))); return a.value

def base(p): launch(load(), p)
def three(p): [launch(m, p) for m in [load() for _ in range(3)]]
def unload_one(p):
    ms = [load() for _ in range(3)]; [launch(m, p) for m in ms]; ok(D.cuModuleUnload(ms[1]))
def unload_first(p):
    ms = [load() for _ in range(3)]; [launch(m, p) for m in ms]; ok(D.cuModuleUnload(ms[0]))
def unload_last(p):
    ms = [load() for _ in range(3)]; [launch(m, p) for m in ms]; ok(D.cuModuleUnload(ms[2]))
def unload_all(p):
    ms = [load() for _ in range(3)]; [launch(m, p) for m in ms]; [ok(D.cuModuleUnload(m)) for m in ms]
def unload_unused(p):
    ms = [load() for _ in range(3)]; launch(ms[0], p); ok(D.cuModuleUnload(ms[1]))
def unload_load(p):
    for _ in range(20):
        m = load(); launch(m, p); ok(D.cuModuleUnload(m))
    launch(load(), p)
def many(p):
    ms = [load() for _ in range(100)]; [launch(m, p) for m in ms]; [ok(D.cuModuleUnload(m)) for m in ms[::2]]
def second_context(p):
    c = C.c_void_p(); ok(D.cuCtxCreate_v2(C.byref(c), 0, 0)); launch(load(), alloc()); ok(D.cuCtxDestroy_v2(c))
def second_context_stays(p):
    c = C.c_void_p(); ok(D.cuCtxCreate_v2(C.byref(c), 0, 0)); launch(load(), alloc())
def context_of_two_unloads(p):
    c = C.c_void_p(); ok(D.cuCtxCreate_v2(C.byref(c), 0, 0)); ms = [load(), load()]; q = alloc(); [launch(m, q) for m in ms]; ok(D.cuModuleUnload(ms[0])); ok(D.cuCtxPopCurrent_v2(C.byref(c))); ms = [load(), load()]; [launch(m, p) for m in ms]; ok(D.cuModuleUnload(ms[1]))
def streams(p):
    m = load(); ss = []
    for i in range(40):
        s = C.c_void_p(); ok(D.cuStreamCreate(C.byref(s), i % 2)); launch(m, p, s); ss.append(s)
    [ok(D.cuStreamDestroy_v2(s)) for s in ss[::2]]
def streams_stay(p):
    m = load()
    for i in range(40):
        s = C.c_void_p(); ok(D.cuStreamCreate(C.byref(s), i % 2)); launch(m, p, s)
def pool(p):
    a = u64(); s = C.c_void_p(); ok(D.cuStreamCreate(C.byref(s), 1)); ok(D.cuMemAllocAsync(C.byref(a), C.c_size_t(1 << 20), s)); launch(load(), a.value, s); ok(D.cuMemFreeAsync(C.c_uint64(a.value), s)); ok(D.cuCtxSynchronize())
def reset(p):
    launch(load(), p); ok(D.cuDevicePrimaryCtxReset_v2(0)); c = C.c_void_p(); ok(D.cuDevicePrimaryCtxRetain(C.byref(c), 0)); ok(D.cuCtxSetCurrent(c)); launch(load(), alloc())
def events(p):
    m = load(); es = []
    for i in range(50):
        e = C.c_void_p(); ok(D.cuEventCreate(C.byref(e), 2)); ok(D.cuEventRecord(e, None)); es.append(e)
    launch(m, p); [ok(D.cuEventDestroy_v2(e)) for e in es[::2]]
def per_thread(p):
    launch(load(), p, C.c_void_p(2))
def stream():
    s = C.c_void_p(); ok(D.cuStreamCreate(C.byref(s), 1)); return s
def make_pool(kind):
    props = (C.c_uint32 * 22)(kind, 0, 1, 0); h = C.c_void_p(); ok(D.cuMemPoolCreate(C.byref(h), props), "pool"); return h
def from_pool(h, s, n=1 << 20):
    a = u64(); ok(D.cuMemAllocFromPoolAsync(C.byref(a), C.c_size_t(n), h, s), "from pool"); launch(load(), a.value, s); return a
def free_async(a, s): ok(D.cuMemFreeAsync(C.c_uint64(a.value), s)); ok(D.cuStreamSynchronize(s))
def managed_pool_made(p): make_pool(2)
def managed_pool_made_and_ended(p): ok(D.cuMemPoolDestroy(make_pool(2)))
def managed_pool_freed(p): h, s = make_pool(2), stream(); free_async(from_pool(h, s), s)
def managed_pool_trimmed(p): h, s = make_pool(2), stream(); free_async(from_pool(h, s), s); ok(D.cuMemPoolTrimTo(h, C.c_size_t(0)))
def managed_pool_ended(p): h, s = make_pool(2), stream(); free_async(from_pool(h, s), s); ok(D.cuMemPoolDestroy(h))
def managed_pool_live(p): h, s = make_pool(2), stream(); from_pool(h, s)
def plain_pool_live(p): h, s = make_pool(1), stream(); from_pool(h, s)
def plain_pool_freed(p): h, s = make_pool(1), stream(); free_async(from_pool(h, s), s)
def managed_live(p): a = u64(); ok(D.cuMemAllocManaged(C.byref(a), C.c_size_t(4 << 20), 1)); launch(load(), a.value)
def managed_freed(p): a = u64(); ok(D.cuMemAllocManaged(C.byref(a), C.c_size_t(4 << 20), 1)); launch(load(), a.value); ok(D.cuMemFree_v2(a))
def managed_module(p):
    m = C.c_void_p(); ok(D.cuModuleLoadData(C.byref(m), PTX.replace(b".visible", b".visible .global .attribute(.managed) .align 4 .u32 word[1024];\n.visible", 1)), "managed module"); launch(m, p)
def managed_module_unloaded(p):
    m = C.c_void_p(); ok(D.cuModuleLoadData(C.byref(m), PTX.replace(b".visible", b".visible .global .attribute(.managed) .align 4 .u32 word[1024];\n.visible", 1)), "managed module"); launch(m, p); ok(D.cuModuleUnload(m))
def pinned_freed(p): h = C.c_void_p(); ok(D.cuMemHostAlloc(C.byref(h), C.c_size_t(5 << 20), 3)); ok(D.cuMemFreeHost(h))
def pinned(p): h = C.c_void_p(); ok(D.cuMemHostAlloc(C.byref(h), C.c_size_t(5 << 20), 3))
def reserved(p): a = u64(); ok(D.cuMemAddressReserve(C.byref(a), C.c_size_t(1 << 40), C.c_size_t(0), C.c_uint64(0), C.c_uint64(0)))

def at(kind, id=0): return (C.c_uint32 * 2)(kind, id)
def default_managed_got(p): h = C.c_void_p(); ok(D.cuMemGetDefaultMemPool(C.byref(h), at(1), 2), "default managed")
def default_managed_freed(p): h, s = C.c_void_p(), stream(); ok(D.cuMemGetDefaultMemPool(C.byref(h), at(1), 2), "default managed"); free_async(from_pool(h, s), s)
def current_managed_got(p): h = C.c_void_p(); ok(D.cuMemGetMemPool(C.byref(h), at(1), 2), "current managed")
def managed_pool_outlived(p): h, s = make_pool(2), stream(); a = from_pool(h, s); ok(D.cuMemPoolDestroy(h)); free_async(a, s)
def host_pool(p):
    props = (C.c_uint32 * 22)(1, 0, 3, 0); h = C.c_void_p(); ok(D.cuMemPoolCreate(C.byref(h), props), "host pool")
def host_pool_freed(p):
    props = (C.c_uint32 * 22)(1, 0, 3, 0); h, s = C.c_void_p(), stream(); ok(D.cuMemPoolCreate(C.byref(h), props), "host pool"); a = u64(); ok(D.cuMemAllocFromPoolAsync(C.byref(a), C.c_size_t(1 << 20), h, s)); free_async(a, s)
def shareable_pool(p):
    props = (C.c_uint32 * 22)(1, 1, 1, 0); h, s = C.c_void_p(), stream(); ok(D.cuMemPoolCreate(C.byref(h), props), "shareable pool"); from_pool(h, s)
def exported_pool(p):
    props = (C.c_uint32 * 22)(1, 1, 1, 0); h, s = C.c_void_p(), stream(); ok(D.cuMemPoolCreate(C.byref(h), props), "shareable pool"); from_pool(h, s); fd = C.c_int(); ok(D.cuMemPoolExportToShareableHandle(C.byref(fd), h, 1, C.c_uint64(0)), "export")
def shared_event(p): e = C.c_void_p(); ok(D.cuEventCreate(C.byref(e), 6), "event"); ok(D.cuEventRecord(e, None))
def shared_event_given(p): e = C.c_void_p(); ok(D.cuEventCreate(C.byref(e), 6), "event"); ok(D.cuIpcGetEventHandle((C.c_char * 64)(), e), "ipc")
def array(p): a = C.c_void_p(); ok(D.cuArrayCreate_v2(C.byref(a), (C.c_uint64 * 3)(256, 256, 0x4_00000020)), "array")
def heap(p): ok(D.cuCtxSetLimit(2, C.c_size_t(64 << 20)), "heap"); launch(load(), p)
def print_fifo(p): ok(D.cuCtxSetLimit(1, C.c_size_t(16 << 20)), "fifo"); launch(load(), p)
def registered(p):
    import mmap; m = mmap.mmap(-1, 4 << 20); b = C.addressof(C.c_char.from_buffer(m)); globals()["keep"] = m; ok(D.cuMemHostRegister_v2(C.c_void_p(b), C.c_size_t(4 << 20), 2), "register")
def vmm(p, kind=0):
    props = (C.c_uint64 * 4)(1 | kind << 32, 1, 0, 0); h, a = u64(), u64(); ok(D.cuMemCreate(C.byref(h), C.c_size_t(4 << 20), props, C.c_uint64(0)), "create"); ok(D.cuMemAddressReserve(C.byref(a), C.c_size_t(4 << 20), C.c_size_t(0), C.c_uint64(0), C.c_uint64(0))); ok(D.cuMemMap(a, C.c_size_t(4 << 20), C.c_size_t(0), h, C.c_uint64(0)), "map"); ok(D.cuMemSetAccess(a, C.c_size_t(4 << 20), (C.c_uint32 * 3)(1, 0, 3), C.c_size_t(1)), "access"); launch(load(), a.value); return h
def vmm_exportable(p): vmm(p, 1)
def vmm_exported(p): fd = C.c_int(); ok(D.cuMemExportToShareableHandle(C.byref(fd), vmm(p, 1), 1, C.c_uint64(0)), "export")
def vmm_fabric(p): vmm(p, 8)
def library(p): l = C.c_void_p(); ok(D.cuLibraryLoadData(C.byref(l), PTX, None, None, 0, None, None, 0), "library")
def graph_memory(p):
    s = stream(); g, e, a = C.c_void_p(), C.c_void_p(), u64(); ok(D.cuStreamBeginCapture_v2(s, 2)); ok(D.cuMemAllocAsync(C.byref(a), C.c_size_t(1 << 20), s)); ok(D.cuMemsetD8Async(a, 1, C.c_size_t(1 << 20), s)); ok(D.cuMemFreeAsync(a, s)); ok(D.cuStreamEndCapture(s, C.byref(g))); ok(D.cuGraphInstantiateWithFlags(C.byref(e), g, C.c_uint64(0))); ok(D.cuGraphLaunch(e, s)); ok(D.cuStreamSynchronize(s))
def green(p):
    r = (C.c_uint8 * 144)(); ok(D.cuDeviceGetDevResource(0, r, 1), "resource"); d, g = C.c_void_p(), C.c_void_p(); ok(D.cuDevResourceGenerateDesc(C.byref(d), r, 1), "desc"); ok(D.cuGreenCtxCreate(C.byref(g), d, 0, 1), "green"); s = C.c_void_p(); ok(D.cuGreenCtxStreamCreate(C.byref(s), g, 1, 0), "stream")
def host_function(p):
    f = C.CFUNCTYPE(None, C.c_void_p)(lambda x: None); globals()["keep"] = f; s = stream(); ok(D.cuLaunchHostFunc(s, f, None)); ok(D.cuStreamSynchronize(s))
def callback(p):
    f = C.CFUNCTYPE(None, C.c_void_p, C.c_int, C.c_void_p)(lambda *x: None); globals()["keep"] = f; s = stream(); ok(D.cuStreamAddCallback(s, f, None, 0)); ok(D.cuStreamSynchronize(s))
def memory_of_dma_buf(p): fd = C.c_int(); a = alloc(2 << 20); ok(D.cuMemGetHandleForAddressRange(C.byref(fd), C.c_uint64(a), C.c_size_t(2 << 20), 1, C.c_uint64(0)), "dma_buf")
def profiler(p): ok(D.cuProfilerStart(), "profiler"); launch(load(), p); ok(D.cuProfilerStop())
def multicast(p):
    props = (C.c_uint64 * 4)(1, 2 << 20, 0, 0); h = u64(); ok(D.cuMulticastCreate(C.byref(h), props), "multicast")
def wide(p): ok(D.cuCtxSetLimit(5, C.c_size_t(128)), "granularity"); ok(D.cuCtxSetCacheConfig(1))
CASES = [base, three, unload_one, unload_first, unload_last, unload_all, unload_unused, unload_load, many, second_context, second_context_stays, context_of_two_unloads, streams, streams_stay, pool, reset, events, per_thread, managed_pool_made, managed_pool_made_and_ended, managed_pool_freed, managed_pool_trimmed, managed_pool_ended, managed_pool_live, plain_pool_live, plain_pool_freed, managed_live, managed_freed, managed_module, managed_module_unloaded, pinned_freed, pinned, reserved, default_managed_got, default_managed_freed, current_managed_got, managed_pool_outlived, host_pool, host_pool_freed, shareable_pool, exported_pool, shared_event, shared_event_given, array, heap, print_fifo, registered, vmm, vmm_exportable, vmm_exported, vmm_fabric, library, graph_memory, green, host_function, callback, memory_of_dma_buf, profiler, multicast, wide]
if len(sys.argv) > 2:
    case = {c.__name__: c for c in CASES}[sys.argv[2]]
    ok(D.cuInit(0)); c = C.c_void_p(); ok(D.cuDevicePrimaryCtxRetain(C.byref(c), 0)); ok(D.cuCtxSetCurrent(c))
    case(alloc())
    big = [l.split()[0] + " " + l.split()[-1] for l in open("/proc/self/maps") if "nvidia-uvm" in l]
    print([[step("Lock", 5000), step("Checkpoint"), step("Restore"), step("Unlock")] for _ in range(3)], big, flush=True)
else:
    for case in CASES:
        try:
            done = subprocess.run([sys.executable, __file__, "--", case.__name__], capture_output=True, text=True, timeout=60)
            print(f"{case.__name__:24}", done.returncode, done.stdout.strip(), done.stderr.strip()[-150:], flush=True)
        except subprocess.TimeoutExpired as e:
            print(f"{case.__name__:24} hangs", flush=True)
