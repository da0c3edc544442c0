#!/usr/bin/env python3
"""A Triton kernel: a linear congruential generator in 512 MiB of words, many rounds in each launch."""
import program
program.need("torch", "triton")
torch = program.torch_once()
import triton, triton.language as tl
@triton.jit
def mix(words, n, salt, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(words + at, mask=at < n)
    for _ in range(ROUNDS): w = w * 1664525 + salt
    tl.store(words + at, w, mask=at < n)
words = torch.arange(1 << 27, device="cuda", dtype=torch.int32)
n = words.numel()
def launch(i): mix[(triton.cdiv(n, 1024),)](words, n, 1013904223 + 2 * i, ROUNDS=64, BLOCK=1024)
launch(0)
with program.work(torch.cuda.synchronize):
    for i in range(program.steps(6000)): launch(i)
program.tell(program.digest(words))
