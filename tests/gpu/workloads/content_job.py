#!/usr/bin/env python3
"""A GPU job that knows every word of its memory: of its tensors of 128 MiB, some are zero, some stay as they are, and each step changes all others.

One JSON line at the end, with how many words were wrong. GO=path: touch path.NAME when set up, wait for path to exist, then start."""
import argparse, json, os, time
p = argparse.ArgumentParser()
p.add_argument("name"); p.add_argument("--gib", type=float, default=8); p.add_argument("--seconds", type=float, default=20)
p.add_argument("--zeros", type=float, default=0, help="part of the memory that is zero"); p.add_argument("--still", type=float, default=0, help="part that no step changes")
a = p.parse_args()
import torch
WORDS = (128 << 20) // 4
n = int(a.gib * 8)
zeros, still = round(n * a.zeros), round(n * a.still)
line = torch.arange(WORDS, device="cuda", dtype=torch.int32)
def begin(i): return torch.zeros(WORDS, device="cuda", dtype=torch.int32) if i < zeros else line * 0x3779_79B1 + (line >> 7) * (2 * i + 1)
t0 = time.time()
ts = [begin(i) for i in range(n)]
torch.cuda.synchronize(); t1 = time.time()
if go := os.environ.get("GO"):
    open(f"{go}.{a.name}", "w").close()
    while not os.path.exists(go): time.sleep(0.002)
s, steps = time.time(), 0
while time.time() - s < a.seconds:
    for t in ts[zeros + still:]: t.add_(steps + 1)
    # What is not changed is read.
    for t in ts[:zeros + still:8]: t.max()
    torch.cuda.synchronize(); steps += 1
e = time.time()
added = steps * (steps + 1) // 2
wrong = sum(int((t != begin(i) + (added % 2**32 - 2**32 * (added % 2**32 >= 2**31) if i >= zeros + still else 0)).sum()) for i, t in enumerate(ts))
print(json.dumps(dict(name=a.name, gib=n / 8, setup_s=round(t1 - t0, 3), start=round(s, 3), end=round(e, 3), steps=steps, words=n * WORDS, wrong=wrong)), flush=True)
