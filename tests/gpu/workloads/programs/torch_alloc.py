#!/usr/bin/env python3
"""PyTorch's allocators (PYTORCH_CUDA_ALLOC_CONF says which): batches of many sizes, blocks of 1 to 61 MiB that live for a while, and caches emptied."""
import os, program
program.need("torch")
torch = program.torch_once()
wanted = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
net = program.mlp(depth=4)
sgd = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
held, wrong = [], torch.zeros((), device="cuda", dtype=torch.int64)
def step(i):
    global held, wrong
    x = torch.randn(64 * (1 + 7 * i % 16), 4096, device="cuda")
    loss = (net(x) - x).square().mean()
    sgd.zero_grad(); loss.backward(); sgd.step()
    held.append((i, torch.full((1 + 37 * i % 61, 1 << 18), i, device="cuda", dtype=torch.int32)))
    if len(held) > 24: # the oldest must be as it was written
        n, block = held.pop(0); wrong += (block != n).sum()
    if i % 100 == 99: torch.cuda.empty_cache()
for i in range(4): step(i)
with program.work(torch.cuda.synchronize):
    for i in range(program.steps(700)): step(i)
right = torch.cuda.get_allocator_backend() == ("cudaMallocAsync" if "cudaMallocAsync" in wanted else "native")
if "expandable" in wanted: right = any(s.get("is_expandable") for s in torch.cuda.memory_snapshot())
program.tell(program.digest(*net.parameters()), ok=right and int(wrong) == 0, right_allocator=right, wrong=int(wrong))
