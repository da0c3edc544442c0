#!/usr/bin/env python3
"""Tensors that go between two cards of one process: PyTorch's copies, an all-reduce by NCCL, CuPy's kernels over peers' memory.

peers_job.py NAME [--seconds S] [--gib GIB]: every word is checked in each step. One JSON line at the end: for each way, what went
wrong, or how often it was right. GIB: on each card, memory that is changed and checked as well."""
import argparse, json, time
p = argparse.ArgumentParser(); p.add_argument("name"); p.add_argument("--seconds", type=float, default=5); p.add_argument("--gib", type=float, default=1)
a = p.parse_args()
import torch
if torch.cuda.device_count() < 2: raise SystemExit("2 GPUs are needed")
side, cards = 2**24, [torch.device("cuda", i) for i in (0, 1)]
said = dict(can=[torch.cuda.can_device_access_peer(i, 1 - i) for i in (0, 1)])
own = [[torch.arange(side, device=c, dtype=torch.int32) + k for k in range(int(a.gib * 2**30) // (side * 4))] for c in cards]
first = [[w.clone() for w in ws[:1]] for ws in own]

def right(t, first, add): return int((t != first + add).sum().item()) == 0

def copies(step):
    there = own[0][0].to("cuda:1"); back = (there + 1).to("cuda:0"); late = torch.empty_like(own[0][0]); late.copy_(there, non_blocking=True)
    pinned = torch.empty(side, dtype=torch.int32, pin_memory=True); pinned.copy_(there); other = pinned.to("cuda:0", non_blocking=True)
    return all((right(there, first[1][0], step), right(back, first[0][0], step + 1), right(late, first[0][0], step), right(other, first[0][0], step)))

def nccl(step):
    x = [own[i][0][: 2**22 + 3].clone() for i in (0, 1)]
    torch.cuda.nccl.all_reduce(x)
    return all(right(x[i], first[i][0][: 2**22 + 3] * 2, 2 * step) for i in (0, 1))

def cupy(step):
    import cupy
    x = [cupy.from_dlpack(own[i][0]) for i in (0, 1)]
    torch.cuda.synchronize(0), torch.cuda.synchronize(1)
    with cupy.cuda.Device(0):
        y = reaches(x[1], x[0], cupy.empty(side, cupy.int32)); cupy.cuda.Device(0).synchronize(); here = torch.from_dlpack(y)
    return right(here, first[0][0] * 2, 2 * step)

def reaches(p, q, out):
    import cupy
    if not cupy.cuda.runtime.deviceCanAccessPeer(0, 1): raise RuntimeError("no peer access")
    try:
        cupy.cuda.runtime.deviceEnablePeerAccess(1)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if "AlreadyEnabled" not in str(error): raise
    cupy.RawKernel('extern "C" __global__ void sum(const int *p, const int *q, int *out, int n) { for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) out[i] = p[i] + q[i]; }', "sum")((256,), (256,), (p, q, out, cupy.int32(side)))
    return out

ways, counts = dict(copies=copies, nccl=nccl, cupy=cupy), {}
begin, step = time.time(), 0
while step < 2 or time.time() - begin < a.seconds:
    step += 1
    for ws in own:
        for w in ws: w.add_(1)
    for name, way in list(ways.items()):
        try:
            if way(step): counts[name] = counts.get(name, 0) + 1
            else: said[name] = f"wrong words in step {step}"; del ways[name]
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"[:160]; del ways[name]
wrong = sum(not right(w - k, first[i][0], step) for i, ws in enumerate(own) for k, w in enumerate(ws))
said |= {name: "right" for name in ways} | dict(memory="right" if not wrong else f"{wrong} tensors are wrong")
print(json.dumps(dict(name=a.name, said=said, steps=step, counts=counts, total_s=round(time.time() - begin, 2))), flush=True)
