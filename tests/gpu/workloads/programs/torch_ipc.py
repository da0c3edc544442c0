#!/usr/bin/env python3
"""PyTorch's multiprocessing: a CUDA tensor shared with a spawned child (CUDA IPC); both change it in place, in turns."""
import program
program.need("torch")
torch = program.torch_once()
import torch.multiprocessing
def change(t, n):
    t.mul_(3).add_(n).remainder_(1000003)
    torch.cuda.synchronize()
def child(pipe):
    try:
        t = pipe.recv()
        pipe.send("ready")
        while (n := pipe.recv()) is not None:
            change(t, n); pipe.send(n)
        del t
        pipe.send("bye")
    except Exception as error:
        pipe.send(f"in the child: {error!r}")
def expect(pipe, word):
    if not pipe.poll(30): raise SystemExit("the child does not answer")
    if (said := pipe.recv()) != word: raise SystemExit(f"{said}, not {word}")
if __name__ == "__main__":
    spawn = torch.multiprocessing.get_context("spawn")
    here, there = spawn.Pipe() # it pickles in this thread: an error shows here, a queue would lose it
    other = spawn.Process(target=child, args=(there,), daemon=True); other.start()
    t = torch.arange(1 << 23, device="cuda")
    here.send(t); expect(here, "ready")
    with program.work(torch.cuda.synchronize):
        for n in range(program.steps(4000)):
            change(t, n); here.send(n); expect(here, n)
    here.send(None); expect(here, "bye"); other.join(20)
    program.tell(program.digest(t), ok=other.exitcode == 0)
