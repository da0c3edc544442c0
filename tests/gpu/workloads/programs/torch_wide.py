#!/usr/bin/env python3
"""PyTorch, broadly: the libraries it stands on, its allocators' corners, streams, profiling. Results are compared by what does not depend on timing."""
import gc, os, threading, program
program.need("torch")
torch = program.torch_once(); F = torch.nn.functional
seen = {}
def close(name, a, b, by=1e-2): seen[name] = bool((a.float() - b.float()).abs().max() <= by * (1 + b.float().abs().max()))
def r(*shape, **more): return torch.randn(*shape, device="cuda", **more)
def libraries():
    x = r(64, 4096); close("fft", torch.fft.ifft(torch.fft.fft(x)).real, x)
    a = r(1024, 1024); s = a @ a.T + 1024 * torch.eye(1024, device="cuda"); b = r(1024, 8)
    close("cholesky", s @ torch.cholesky_solve(b, torch.linalg.cholesky(s)), b); close("solve", s @ torch.linalg.solve(s, b), b)
    w, v = torch.linalg.eigh(s); close("eigh", v @ torch.diag(w) @ v.T, s)
    u, d, h = torch.linalg.svd(a[:256, :256]); close("svd", u @ torch.diag(d) @ h, a[:256, :256])
    m = torch.where(r(2048, 2048) > 1.5, 1.0, 0.0).relu(); close("sparse", torch.sparse.mm(m.to_sparse_csr(), b.repeat(2, 1)), m @ b.repeat(2, 1))
    q, k, v = (r(4, 16, 1024, 64, dtype=torch.bfloat16) for _ in range(3))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH): wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, name)):
            try: close(name, F.scaled_dot_product_attention(q, k, v, is_causal=True), wanted, 5e-2)
            except RuntimeError as error: seen[name] = str(error)[:60]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        net = torch.nn.Sequential(torch.nn.Conv2d(64, 128, 3), torch.nn.BatchNorm2d(128), torch.nn.ReLU()).cuda().to(memory_format=torch.channels_last)
        seen["conv"] = bool(net(r(32, 64, 56, 56).to(memory_format=torch.channels_last)).float().mean().backward() is None)
    lstm = torch.nn.LSTM(128, 256, 2, batch_first=True).cuda(); seen["lstm"] = tuple(lstm(r(8, 64, 128))[0].shape) == (8, 64, 256)
    scaled = torch._scaled_mm(torch.ones(256, 256, device="cuda").to(torch.float8_e4m3fn), torch.ones(256, 256, device="cuda").to(torch.float8_e4m3fn).T, scale_a=torch.ones((), device="cuda"), scale_b=torch.ones((), device="cuda"), out_dtype=torch.bfloat16)
    seen["fp8"] = bool((scaled == 256).all()); seen["sort"] = bool((torch.sort(r(1 << 22)).values.diff() >= 0).all())
    seen["index_add"] = float(torch.zeros(1000, device="cuda").index_add_(0, torch.arange(1 << 20, device="cuda") % 1000, torch.ones(1 << 20, device="cuda")).sum())
def memory():
    free, total = torch.cuda.mem_get_info(); seen["free<=total"] = free <= total
    try: torch.empty(1 << 44, device="cuda", dtype=torch.uint8); seen["oom"] = "none"
    except torch.OutOfMemoryError: seen["oom"] = "raised"
    torch.cuda.set_per_process_memory_fraction(0.01)
    try: torch.empty(total // 50, device="cuda", dtype=torch.uint8); seen["fraction"] = "none"
    except torch.OutOfMemoryError: seen["fraction"] = "raised"
    torch.cuda.set_per_process_memory_fraction(1.0)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool): held = torch.full((1 << 24,), 7, device="cuda", dtype=torch.int32)
    seen["mempool"] = int(held.sum()); del held, pool; gc.collect(); torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(max_entries=1000); x = r(1 << 20); seen["history"] = len(torch.cuda.memory._snapshot()["device_traces"]) > 0
    torch.cuda.memory._record_memory_history(enabled=None)
    pinned = torch.arange(1 << 22, dtype=torch.int32).pin_memory(); moved = pinned.to("cuda", non_blocking=True); back = torch.empty_like(pinned).pin_memory()
    back.copy_(moved, non_blocking=True); torch.cuda.synchronize(); seen["pinned"] = bool((back == pinned).all())
    stats = torch.cuda.memory_stats(); seen["stats"] = stats["allocated_bytes.all.current"] > 0
    seen["uuid"] = str(torch.cuda.get_device_properties(0).uuid); seen["memory_total"] = torch.cuda.get_device_properties(0).total_memory // 2**30
def streams():
    total = torch.zeros(8, device="cuda", dtype=torch.int64); ss = [torch.cuda.Stream(priority=-(i % 2)) for i in range(8)]; torch.cuda.synchronize()
    def one(i):
        with torch.cuda.stream(ss[i]):
            for n in range(200):
                x = torch.full((1000 + n,), n, device="cuda", dtype=torch.int64); x.record_stream(torch.cuda.current_stream()); total[i] += x.sum()
    threads = [threading.Thread(target=one, args=(i,)) for i in range(8)]
    for t in threads: t.start()
    for t in threads: t.join()
    event = torch.cuda.Event(enable_timing=True); late = torch.cuda.Event(enable_timing=True)
    for s in ss: torch.cuda.current_stream().wait_stream(s)
    event.record(); seen["threads"] = total.tolist(); torch.cuda._sleep(10_000_000); late.record(); late.synchronize(); seen["elapsed"] = event.elapsed_time(late) > 1
def graphs():
    g, side = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.Stream(); x = torch.zeros(1 << 20, device="cuda")
    with torch.cuda.graph(g, stream=side, capture_error_mode="thread_local"): y = (x + 1).sin().cos(); x.add_(1)
    g.instantiate()
    for _ in range(10): g.replay()
    close("graph", y, (torch.full_like(y, 10.0)).sin().cos(), 1e-5); seen["graph_steps"] = float(x[0])
    model = torch.nn.Linear(512, 512).cuda(); called = torch.cuda.make_graphed_callables(model, (r(64, 512, requires_grad=True),)); z = r(64, 512)
    close("callables", called(z), F.linear(z, model.weight, model.bias), 1e-3)
def profiled():
    if os.environ.get("PROFILE") == "0": return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA], profile_memory=True) as p:
        a = r(1024, 1024)
        for _ in range(20): a = (a @ a).tanh()
        torch.cuda.synchronize()
    kernels = sum(e.count for e in p.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA and "gemm" in e.key.lower() or "cutlass" in e.key.lower())
    seen["profiled"] = kernels >= 20
def compiled():
    f = torch.compile(lambda a, b: (a @ b).relu().sum(-1), mode="max-autotune-no-cudagraphs" if program.steps(100) < 100 else "reduce-overhead"); a, b = r(256, 256), r(256, 256)
    for _ in range(4): out = f(a, b).clone()
    close("compiled", out, (a @ b).relu().sum(-1), 1e-2)
with program.work(torch.cuda.synchronize):
    for part in (libraries, memory, streams, graphs, profiled, compiled): part(); torch.cuda.synchronize()
seen.pop("memory_total")  # a limit is the total
print(seen, file=__import__("sys").stderr)
program.tell(str(seen), ok=all(v is not False for v in seen.values()), seen={k: v for k, v in seen.items() if v is False or isinstance(v, str)})
