#!/usr/bin/env python3
"""PyTorch, eager: trains a small convolutional net with two large linear layers; about 3 GiB."""
import program
program.need("torch")
torch = program.torch_once(); nn = torch.nn
with torch.device("cuda"):
    net = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.BatchNorm2d(128), nn.ReLU(), nn.Flatten(), nn.Linear(128 * 16 * 16, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
    batches = [(torch.randn(512, 3, 32, 32), torch.randint(10, (512,))) for _ in range(8)]
adam = torch.optim.Adam(net.parameters(), lr=1e-4)
def step(i):
    x, y = batches[i % len(batches)]
    loss = nn.functional.cross_entropy(net(x), y)
    adam.zero_grad(); loss.backward(); adam.step()
    return loss.detach()
first = float(step(0))
with program.work(torch.cuda.synchronize):
    for i in range(program.steps(450)):
        loss = step(i)
        if i % 10 == 0: last = float(loss)
program.tell(program.digest(*net.parameters()), ok=last < first, loss=last)
