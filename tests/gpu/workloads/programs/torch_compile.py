#!/usr/bin/env python3
"""torch.compile: forward and backward of an MLP, compiled; the compilation is in the set-up."""
import program
program.need("torch")
torch = program.torch_once()
net = torch.compile(program.mlp())
x, y = torch.randn(512, 4096, device="cuda"), torch.randn(512, 4096, device="cuda")
adam = torch.optim.Adam(net.parameters(), lr=1e-4)
def step():
    loss = (net(x) - y).square().mean()
    adam.zero_grad(); loss.backward(); adam.step()
    return loss.detach()
first = float(step()); step()
with program.work(torch.cuda.synchronize):
    for i in range(program.steps(350)): last = step()
program.tell(program.digest(*net.parameters()), ok=float(last) < first, loss=float(last))
