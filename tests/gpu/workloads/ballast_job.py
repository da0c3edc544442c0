#!/usr/bin/env python3
"""Takes plain device memory until only KEEP GiB are free, then waits to be killed. ballast_job.py NAME KEEP; GO=path: touches path.NAME when it has them."""
import os, signal, sys, torch
keep, taken, piece = float(sys.argv[2]) * 2**30, [], 8 << 30
while piece >= 64 << 20:
    if torch.cuda.mem_get_info()[0] >= keep + piece: taken.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
    else: piece //= 2
print("free GiB:", torch.cuda.mem_get_info()[0] / 2**30, flush=True)
open(f"{os.environ['GO']}.{sys.argv[1]}", "w").close()
signal.pause()
