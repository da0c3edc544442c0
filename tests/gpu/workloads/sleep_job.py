#!/usr/bin/env python3
"""A notebook: words, a product by cuBLAS, a graph or a kernel of its own. sleep_job.py NAME [GIB] [torch|jax|cupy|triton]. Each line on standard input
names an operation; the answer is one line of JSON: how long it took, and whether all results are right."""
import ctypes, json, sys, time

gib = float(sys.argv[2]) if len(sys.argv) > 2 else 1


def count_by_nvml():
    """NVML's own answer, by functions that are looked up each time."""
    nvml, devices = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint()
    assert nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetCount_v2(ctypes.byref(devices)) == 0 and devices.value > 0


def torch_notebook():
    import torch
    words = torch.arange(int(gib * (1 << 27)), dtype=torch.int64, device="cuda")
    total, square = int(words.sum()), torch.randn(1024, 1024, device="cuda")
    product = float((square @ square).sum())
    state, graph, event, stream = torch.zeros(1024, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Event(), torch.cuda.Stream()
    state.add_(1), event.record(), torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        state.add_(1)
    count = 1

    def replay():
        nonlocal count
        graph.replay()
        count += 1

    def is_right():
        right = int(words.sum()) == total and float((square @ square).sum()) == product and float(state[7]) == count
        torch.cuda.synchronize()
        return right

    return is_right, dict(
        add=lambda: square.add_(0), info=torch.cuda.mem_get_info, event=event.query, stream=stream.query, synchronize=torch.cuda.synchronize, item=lambda: words[5].item(),
        record=event.record, wait=stream.synchronize, replay=replay, product=lambda: square @ square, allocate=lambda: torch.empty(1 << 28, device="cuda"), elapsed=event.synchronize,
        free=torch.cuda.empty_cache, new=lambda: square.cosh(), copy=lambda: square.cpu(), to=lambda: torch.ones(1 << 20).cuda(), pinned=lambda: torch.empty(1 << 20, pin_memory=True),
        streams=lambda: torch.cuda.Stream(priority=-1).synchronize(), device=lambda: torch.cuda.set_device(0), properties=lambda: torch.cuda.get_device_properties(0), nvml=count_by_nvml)


def jax_notebook():
    import jax, jax.numpy as jnp
    sum_of, product_of = jax.jit(lambda w: (w ^ (w >> 7)).sum()), jax.jit(lambda s: (s @ s).sum())
    words, square = jnp.arange(int(gib * (1 << 28)), dtype=jnp.int32), jax.random.normal(jax.random.key(1), (1024, 1024))
    step = jax.jit(lambda s: s + 1, donate_argnums=0)
    total, product, state, count = int(sum_of(words)), float(product_of(square)), step(jnp.zeros(1024, jnp.int32)), 1

    def advance():
        nonlocal state, count
        state, count = step(state), count + 1

    return (lambda: int(sum_of(words)) == total and float(product_of(square)) == product and int(state[7]) == count), dict(
        add=advance, item=lambda: int(words[5]), put=lambda: jax.device_put(jnp.ones(1 << 20)).block_until_ready(), copy=lambda: jax.device_get(square),
        product=lambda: product_of(square).block_until_ready(), allocate=lambda: jnp.zeros(1 << 26).block_until_ready(), stats=jax.local_devices()[0].memory_stats)


def cupy_notebook():
    import cupy
    words, square = cupy.arange(int(gib * (1 << 27)), dtype=cupy.int64), cupy.random.default_rng(1).standard_normal((1024, 1024), dtype=cupy.float32)
    total, product, state, stream, count = int(words.sum()), float((square @ square).sum()), cupy.zeros(1024), cupy.cuda.Stream(non_blocking=True), 1
    with stream:
        state += 1
        stream.synchronize()
        stream.begin_capture()
        state += 1
        graph = stream.end_capture()

    def replay():
        nonlocal count
        graph.launch(stream)
        stream.synchronize()
        count += 1

    return (lambda: int(words.sum()) == total and float((square @ square).sum()) == product and float(state[7]) == count), dict(
        add=lambda: square.__iadd__(0), replay=replay, item=lambda: int(words[5]), copy=square.get, info=cupy.cuda.Device().mem_info.__iter__, free=cupy.get_default_memory_pool().free_all_blocks,
        synchronize=cupy.cuda.Device().synchronize, pinned=lambda: cupy.cuda.alloc_pinned_memory(1 << 20), kernel=lambda: cupy.ElementwiseKernel("T x", "T y", "y = x * 2")(square))


def triton_notebook():
    import torch, triton, triton.language as tl

    source = triton.jit(mix)
    words = torch.arange(int(gib * (1 << 28)), dtype=torch.int32, device="cuda")
    mixed = torch.empty_like(words)

    def launch():
        source[(triton.cdiv(words.numel(), 1024),)](words, mixed, words.numel(), BLOCK=1024)

    launch()
    total, total_of_mixed = int(words.sum()), int(mixed.sum())

    def is_right():
        mixed.zero_(), launch()
        return int(words.sum()) == total and int(mixed.sum()) == total_of_mixed

    return is_right, dict(add=launch, item=lambda: words[5].item(), compiled=lambda: torch.compile(torch.cos)(words[:1024].float()), synchronize=torch.cuda.synchronize)


def mix(words, mixed, n, BLOCK: "tl.constexpr"):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(mixed + at, tl.load(words + at, mask=at < n) * 1664525 + 1013904223, mask=at < n)


if __name__ == "__main__":
    which = sys.argv[3] if len(sys.argv) > 3 else "torch"
    if which == "triton":
        import triton.language as tl  # the kernel's globals are those of this file
    is_right, operations = dict(torch=torch_notebook, jax=jax_notebook, cupy=cupy_notebook, triton=triton_notebook)[which]()
    print(json.dumps(dict(operations=list(operations))), flush=True)
    for line in sys.stdin:
        begin = time.perf_counter()
        operations[line.strip()]()
        took = time.perf_counter() - begin
        right = is_right()
        print(json.dumps(dict(took=round(took, 4), all=round(time.perf_counter() - begin, 4), right=right)), flush=True)
