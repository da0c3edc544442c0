#!/usr/bin/env python3
"""PyTorch on two GPUs, one process each: every collective, sends, sharded training (FSDP), tensor parallelism, symmetric memory; and one process with both."""
import datetime, os, socket, program
program.need("torch")
torch = program.torch_once()
import torch.distributed as dist, torch.multiprocessing
seen = {}
def part(f):
    try: seen[f.__name__] = f()
    except Exception as error: seen[f.__name__] = f"{type(error).__name__}: {error}"[:100]
def rank(r, port):
    torch.cuda.set_device(r); d = torch.device("cuda", r)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"tcp://127.0.0.1:{port}", rank=r, world_size=2, timeout=datetime.timedelta(seconds=30), device_id=d)
    n = 1 << 22; mine = torch.arange(n, device=d) + r
    def collectives():
        a = mine.clone(); dist.all_reduce(a); ok = bool((a == 2 * torch.arange(n, device=d) + 1).all())
        g = torch.empty(2 * n, device=d, dtype=mine.dtype); dist.all_gather_into_tensor(g, mine); s = torch.empty(n // 2, device=d, dtype=mine.dtype); dist.reduce_scatter_tensor(s, mine)
        t = torch.empty_like(mine); dist.all_to_all_single(t, mine); b = mine.clone(); dist.broadcast(b, 1); dist.barrier()
        return ok, int(g.sum()), int(s.sum()) > 0, int(b[0]), int(t.sum()) > 0
    def sends():
        other = torch.empty_like(mine)
        for q in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, 1 - r), dist.P2POp(dist.irecv, other, 1 - r)]): q.wait()
        return int(other[0]) == 1 - r
    def sharded():
        from torch.distributed.fsdp import fully_shard
        torch.manual_seed(1); net = program.mlp(1024, 4)
        for l in net: fully_shard(l)
        fully_shard(net); adam = torch.optim.Adam(net.parameters(), lr=1e-3); x = torch.randn(256, 1024, device=d); first = None
        for _ in range(program.steps(40)):
            loss = (net(x) - x).square().mean(); loss.backward(); adam.step(); adam.zero_grad(); first = first or float(loss)
        return float(loss) < first
    def tensors():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        torch.manual_seed(1); net = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512)).cuda(); x = torch.randn(64, 512, device=d); dist.broadcast(x, 0); want = net(x)
        got = parallelize_module(net, init_device_mesh("cuda", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})(x); return bool((got - want).abs().max() < 1e-3)
    def symmetric():
        import torch.distributed._symmetric_memory as symm
        t = symm.empty(1 << 20, device=d, dtype=torch.float32); h = symm.rendezvous(t, dist.group.WORLD); t.fill_(r + 1.0); h.barrier()
        out = torch.ops.symm_mem.one_shot_all_reduce(t, "sum", dist.group.WORLD.group_name); peer = h.get_buffer(1 - r, (1 << 20,), torch.float32); ok = bool((peer == 2.0 - r).all()); h.barrier()
        return ok, bool((out == 3).all())
    def graphed():
        a = mine.float(); g = torch.cuda.CUDAGraph(); side = torch.cuda.Stream()
        with torch.cuda.stream(side): dist.all_reduce(a)
        torch.cuda.synchronize(); a.fill_(1)
        with torch.cuda.graph(g): dist.all_reduce(a)
        for _ in range(5): g.replay()
        torch.cuda.synchronize(); return float(a[0])
    with program.work(torch.cuda.synchronize):
        for f in (collectives, sends, sharded, tensors, symmetric, graphed): part(f); torch.cuda.synchronize(); dist.barrier()
    checks = [None, None]; dist.all_gather_object(checks, seen); dist.destroy_process_group()
    if r == 0:
        if hasattr(torch.cuda, "device_count"):  # one process with both
            x = torch.arange(1 << 22, device="cuda:0"); y = x.to("cuda:1"); y += 1; z = y.to("cuda:0"); seen["both"] = int((z - x).sum()), torch.cuda.can_device_access_peer(0, 1)
            net = torch.nn.DataParallel(torch.nn.Linear(64, 64).cuda()); seen["data_parallel"] = tuple(net(torch.randn(128, 64, device="cuda:0")).shape)
        print(checks, seen, file=__import__("sys").stderr)
        flat = [v for c in checks for w in c.values() for v in (w if isinstance(w, tuple) else (w,))]
        program.tell(str((checks, seen)), ok=all(v is not False for v in flat), seen=str({k: v for k, v in seen.items() if isinstance(v, str)}))
if __name__ == "__main__":
    if (n := torch.cuda.device_count()) < 2: program.skip(f"{n} GPU, 2 are needed")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
    torch.multiprocessing.spawn(rank, args=(port,), nprocs=2)
