#!/usr/bin/env python3
"""DistributedDataParallel over NCCL: two processes, one GPU each."""
import datetime, socket, program
program.need("torch")
torch = program.torch_once()
import torch.distributed as dist, torch.multiprocessing
def rank(r, port):
    torch.cuda.set_device(r)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=r, world_size=2, timeout=datetime.timedelta(seconds=30), device_id=torch.device("cuda", r))
    net = torch.nn.parallel.DistributedDataParallel(program.mlp(depth=6), device_ids=[r])
    adam = torch.optim.Adam(net.parameters(), lr=1e-4)
    torch.manual_seed(10 + r)
    x, y = torch.randn(512, 4096, device="cuda"), torch.randn(512, 4096, device="cuda")
    def step():
        loss = (net(x) - y).square().mean()
        adam.zero_grad(); loss.backward(); adam.step()
        return loss.detach()
    first = float(step()); step()
    with program.work(torch.cuda.synchronize):
        for i in range(program.steps(350)): last = step()
    check = program.digest(*net.parameters())
    checks = [None, None]; dist.all_gather_object(checks, check) # both have the same weights
    dist.destroy_process_group()
    if r == 0: program.tell(check, ok=checks[0] == checks[1] and float(last) < first, loss=float(last))
if __name__ == "__main__":
    if (n := torch.cuda.device_count()) < 2: program.skip(f"{n} GPU, 2 are needed")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
    torch.multiprocessing.spawn(rank, args=(port,), nprocs=2)
