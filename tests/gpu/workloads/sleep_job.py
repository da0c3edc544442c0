#!/usr/bin/env python3
"""A notebook: GIB of words, cuBLAS, a captured graph. sleep_job.py NAME [GIB]. Each line on standard input names an operation; the answer is one line of
JSON: how long it took, and whether all results are right."""
import ctypes, json, sys, time
import torch

gib = float(sys.argv[2]) if len(sys.argv) > 2 else 1
words = torch.arange(int(gib * (1 << 27)), dtype=torch.int64, device="cuda")
total, square = int(words.sum()), torch.randn(1024, 1024, device="cuda")
product = float((square @ square).sum())
state, graph, event, stream = torch.zeros(1024, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Event(), torch.cuda.Stream()
state.add_(1), event.record(), torch.cuda.synchronize()
with torch.cuda.graph(graph):
    state.add_(1)
count = 1


def replay():
    global count
    graph.replay()
    count += 1


def count_by_nvml():
    """NVML's own answer, by functions that are looked up each time."""
    nvml, devices = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint()
    assert nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetCount_v2(ctypes.byref(devices)) == 0 and devices.value > 0


operations = dict(
    add=lambda: square.add_(0), info=torch.cuda.mem_get_info, event=event.query, stream=stream.query, synchronize=torch.cuda.synchronize, item=lambda: words[5].item(),
    record=event.record, wait=stream.synchronize, replay=replay, product=lambda: square @ square, allocate=lambda: torch.empty(1 << 28, device="cuda"), elapsed=event.synchronize,
    free=torch.cuda.empty_cache, new=lambda: square.cosh(), copy=lambda: square.cpu(), to=lambda: torch.ones(1 << 20).cuda(), pinned=lambda: torch.empty(1 << 20, pin_memory=True),
    streams=lambda: torch.cuda.Stream(priority=-1).synchronize(), device=lambda: torch.cuda.set_device(0), properties=lambda: torch.cuda.get_device_properties(0), nvml=count_by_nvml)
print(json.dumps(dict(operations=list(operations))), flush=True)
for line in sys.stdin:
    begin = time.perf_counter()
    operations[line.strip()]()
    took = time.perf_counter() - begin
    right = int(words.sum()) == total and float((square @ square).sum()) == product and float(state[7]) == count
    torch.cuda.synchronize()
    print(json.dumps(dict(took=round(took, 4), all=round(time.perf_counter() - begin, 4), right=right)), flush=True)
