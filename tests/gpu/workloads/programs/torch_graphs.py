#!/usr/bin/env python3
"""CUDA graphs: a whole training step, captured once and replayed; every replay gets a new batch by a copy outside the graph."""
import program
program.need("torch")
torch = program.torch_once()
net = program.mlp()
batches = [torch.randn(512, 4096, device="cuda") for _ in range(8)]
x, y = batches[0].clone(), torch.randn(512, 4096, device="cuda")
adam = torch.optim.Adam(net.parameters(), lr=1e-4, capturable=True)
def step():
    loss = (net(x) - y).square().mean()
    adam.zero_grad(); loss.backward(); adam.step()
    return loss.detach()
side = torch.cuda.Stream(); side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    first = float(step()); step(); step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
adam.zero_grad()
with torch.cuda.graph(graph): loss = step()
with program.work(torch.cuda.synchronize):
    for i in range(program.steps(350)):
        x.copy_(batches[i % len(batches)]); graph.replay()
program.tell(program.digest(*net.parameters()), ok=float(loss) < first, loss=float(loss))
