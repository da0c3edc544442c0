#!/usr/bin/env python3
"""CuPy, broadly: its pools (its own, the driver's, managed), captured streams, textures, FFT, solvers, sparse matrices, pinned memory, threads."""
import threading, program
program.need("cupy")
import cupy as cp, cupyx, cupyx.scipy.sparse as sparse
seen = {}
def close(name, a, b, by=1e-6): seen[name] = bool(abs(a - b).max() <= by * (1 + abs(b).max()))
def algebra():
    cp.random.seed(1); a = cp.random.rand(512, 512); close("fft", cp.fft.ifft2(cp.fft.fft2(a)).real, a); s = a @ a.T + 512 * cp.eye(512); close("solve", s @ cp.linalg.solve(s, a), a)
    w, v = cp.linalg.eigh(s); close("eigh", v @ cp.diag(w) @ v.T, s); m = sparse.random(2000, 2000, 0.01, format="csr"); x = cp.random.rand(2000); close("sparse", m @ x, m.toarray() @ x)
def pools():
    for name, allocate in (("none", None), ("own", cp.cuda.MemoryPool().malloc), ("managed", cp.cuda.MemoryPool(cp.cuda.malloc_managed).malloc), ("async", cp.cuda.MemoryAsyncPool().malloc), ("async_raw", cp.cuda.malloc_async)):
        with cp.cuda.using_allocator(allocate):
            held = [cp.full(1000 * (1 + i % 97), i, dtype=cp.int64) for i in range(400)]; seen[f"pool {name}"] = int(sum(int(h.sum()) for h in held)); del held
def streams():
    s = cp.cuda.Stream(non_blocking=True); x = cp.zeros(1 << 20, dtype=cp.float32); cp.cuda.Device().synchronize()
    with s:
        s.begin_capture(); x += 1; x *= 2; g = s.end_capture()
        for _ in range(5): g.launch(s)
        s.synchronize()
    seen["graph"] = float(x[0]); host = cupyx.empty_pinned((1 << 20,), dtype=cp.float32); x.get(out=host, stream=s, blocking=False); s.synchronize(); seen["pinned"] = float(host.sum())
    called = []; s.launch_host_func(lambda _: called.append(1), None); s.synchronize(); seen["host_function"] = len(called); total = [0] * 8
    def one(i):
        with cp.cuda.Stream(non_blocking=True, ptds=False) as t:
            for n in range(100): total[i] += int(cp.arange(1000 + n).sum())
    ts = [threading.Thread(target=one, args=(i,)) for i in range(8)]; [t.start() for t in ts]; [t.join() for t in ts]; seen["threads"] = total
def textures():
    t = cp.cuda.texture; channel = t.ChannelFormatDescriptor(32, 0, 0, 0, cp.cuda.runtime.cudaChannelFormatKindFloat); array = t.CUDAarray(channel, 64, 64); data = cp.arange(4096, dtype=cp.float32).reshape(64, 64)
    array.copy_from(data); back = cp.zeros_like(data); array.copy_to(back); close("array", back, data)
    obj = t.TextureObject(t.ResourceDescriptor(cp.cuda.runtime.cudaResourceTypeArray, cuArr=array), t.TextureDescriptor((cp.cuda.runtime.cudaAddressModeClamp,) * 2))
    k = cp.RawKernel('extern "C" __global__ void read(cudaTextureObject_t t, float* o) { int x = threadIdx.x, y = blockIdx.x; o[y * 64 + x] = tex2D<float>(t, x, y); }', "read"); k((64,), (64,), (obj, back)); close("texture", back, data)
with program.work(cp.cuda.Device().synchronize):
    for _ in range(program.steps(3)):
        for part in (algebra, pools, streams, textures): part(); cp.cuda.Device().synchronize()
print(seen, file=__import__("sys").stderr)
program.tell(str(seen), ok=all(v is not False for v in seen.values()), seen={k: v for k, v in seen.items() if v is False or isinstance(v, str)})
