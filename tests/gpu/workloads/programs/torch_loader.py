#!/usr/bin/env python3
"""DataLoader with workers forked from a process that uses the GPU already, new ones in every epoch, and pinned memory."""
import program
program.need("torch")
torch = program.torch_once(); nn = torch.nn
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 256 * 48
    def __getitem__(self, i): return torch.randn(3 * 64 * 64, generator=torch.Generator().manual_seed(i)), i % 10
net = nn.Sequential(nn.Linear(3 * 64 * 64, 4096), nn.GELU(), nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 10)).cuda()
adam = torch.optim.Adam(net.parameters(), lr=1e-4)
loader = torch.utils.data.DataLoader(Numbers(), batch_size=256, shuffle=True, generator=torch.Generator().manual_seed(2), num_workers=6, pin_memory=True, multiprocessing_context="fork")
pinned = labels = 0
net(torch.zeros(256, 3 * 64 * 64, device="cuda"))
with program.work(torch.cuda.synchronize):
    for epoch in range(program.steps(5)):
        for x, y in loader:
            pinned += x.is_pinned(); labels += int(y.sum())
            loss = nn.functional.cross_entropy(net(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            adam.zero_grad(); loss.backward(); adam.step()
program.tell(f"{program.digest(*net.parameters())} {labels}", ok=pinned == 48 * program.steps(5), loss=float(loss.detach()))
