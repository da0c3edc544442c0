#!/usr/bin/env python3
"""Captures CUDA graphs again and again, slowly, and replays each; every replay's result is compared with the eager one."""
import json, sys, time, torch
g = torch.Generator(device="cuda").manual_seed(5)
ws = [torch.randn(4096, 4096, device="cuda", generator=g) * 0.02 for _ in range(96)]
x = torch.randn(256, 4096, device="cuda", generator=g)
def work(y):
    for w in ws: y = torch.tanh(y @ w)
    return y
expected = work(x).clone(); torch.cuda.synchronize()
captures = replays = wrong = 0; error = None; end = time.time() + 30
try:
    while time.time() < end:
        side = torch.cuda.Stream(); side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side): work(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x
            for i, w in enumerate(ws):
                y = torch.tanh(y @ w)
                if i % 8 == 0: time.sleep(0.01)
        captures += 1
        for _ in range(20):
            graph.replay(); replays += 1
            wrong += not torch.equal(y, expected)
except Exception as e:
    error = repr(e)[:300]
print(json.dumps(dict(name=sys.argv[1], captures=captures, replays=replays, wrong=wrong, error=error)), flush=True)
sys.exit(bool(error))
