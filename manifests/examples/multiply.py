"""Multiplies matrices on the first GPU for ten minutes and says how far it is."""

import time

import torch

SIDE = 16384  # 1 GiB a matrix

free, total = torch.cuda.mem_get_info()
print(f"{torch.cuda.get_device_name()}: {total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free", flush=True)
left = torch.rand(SIDE, SIDE, device="cuda")
right = torch.rand(SIDE, SIDE, device="cuda")
product = torch.empty(SIDE, SIDE, device="cuda")
end = time.monotonic() + 600
done = 0
said = 0.0
while time.monotonic() < end:
    torch.matmul(left, right, out=product)
    torch.cuda.synchronize()
    done += 1
    if time.monotonic() - said >= 10:
        said = time.monotonic()
        print(f"{done} products", flush=True)
