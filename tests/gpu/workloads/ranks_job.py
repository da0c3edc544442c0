#!/usr/bin/env python3
"""Two ranks over NCCL, one GPU each: GIB of integers on each GPU; each step changes all of them, then sums a part of them over both ranks.

One JSON line at the end: set-up and total times, and a checksum of every word of both GPUs that depends on (seed, steps) alone.
GO=path: touch path.NAME when set up, wait for path to exist, then start (a barrier for several jobs)."""
import argparse, datetime, json, os, socket, time
p = argparse.ArgumentParser(); p.add_argument("name"); p.add_argument("--gib", type=float, default=4); p.add_argument("--steps", type=int, default=200); p.add_argument("--seed", type=int, default=1)
a = p.parse_args()
import torch, torch.distributed as dist, torch.multiprocessing
def rank(r, port):
    t0 = time.time()
    torch.cuda.set_device(r)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=r, world_size=2, timeout=datetime.timedelta(seconds=90), device_id=torch.device("cuda", r))
    side, n = 2**26, int(a.gib * 4)
    ws = [torch.arange(side, device="cuda", dtype=torch.int32) * (a.seed + i + 7 * r) for i in range(n)]
    dist.all_reduce(ws[0][:1024]); torch.cuda.synchronize()
    setup = time.time() - t0
    if go := os.environ.get("GO"): # on the host, all ranks: a kernel that waits for the other rank cannot give the GPU away
        if r == 0: open(f"{go}.{a.name}", "w").close()
        while not os.path.exists(go): time.sleep(0.002)
    dist.barrier(); begin = time.time()
    for step in range(a.steps):
        for w in ws: w.mul_(3).add_(step)
        shared = ws[step % n][: 2**24]; dist.all_reduce(shared); shared.bitwise_and_(0xffffff)
        if step % 8 == 7: torch.cuda.synchronize()
    torch.cuda.synchronize(); total = time.time() - begin
    mine = torch.tensor([sum(int(w.to(torch.int64).sum()) * (i + 1) for i, w in enumerate(ws)) % 2**61], device="cuda"); both = [torch.zeros_like(mine), torch.zeros_like(mine)]
    dist.all_gather(both, mine)
    if r == 0: print(json.dumps(dict(name=a.name, setup_s=round(setup, 2), total_s=round(total, 3), start=begin, end=begin + total, steps=a.steps, sum=[int(x) for x in both])), flush=True)
    dist.destroy_process_group()
if __name__ == "__main__":
    if torch.cuda.device_count() < 2: raise SystemExit("2 GPUs are needed")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
    torch.multiprocessing.spawn(rank, args=(port,), nprocs=2)
