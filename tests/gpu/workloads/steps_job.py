#!/usr/bin/env python3
"""Steps of a few ms, each waited for. steps_job.py NAME FILE SECONDS: writes when each step began and how long it took, in seconds, as pairs of doubles."""
import array, json, sys, time
import torch

name, path, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
a, steps = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16), array.array("d")
out = torch.empty_like(a)
until = time.time() + seconds
while (begin := time.time()) < until:
    for _ in range(20):
        torch.mm(a, a, out=out)
    torch.cuda.synchronize()
    steps.extend((begin, time.time() - begin))
with open(path, "wb") as f:
    steps.tofile(f)
print(json.dumps(dict(name=name, steps=len(steps) // 2)), flush=True)
