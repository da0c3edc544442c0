#!/usr/bin/env python3
"""JAX with its default preallocation (three quarters of what it takes for the GPU's memory): chained products, all buffers donated.

Whole numbers below 2^24, so that the result does not depend on the algorithms that XLA chooses by timing them. POOL_GIB: how
much it must have allocated, within a tenth."""
import functools, os, program
program.need("jax")
import jax, jax.numpy as jnp
SIDE = 4096
@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(x, ws, i):
    kept = []
    for w in ws:
        y = jnp.matmul(x, w, preferred_element_type=jnp.float32).astype(jnp.int32)
        x = ((y + i) % 31).astype(jnp.bfloat16)
        kept.append(((w.astype(jnp.int32) + x.astype(jnp.int32)) % 7).astype(jnp.bfloat16))
    return x, kept
def whole(key, below): return jax.random.randint(jax.random.key(key), (SIDE, SIDE), 0, below).astype(jnp.bfloat16)
x, ws = whole(0, 31), [whole(k, 7) for k in range(1, 9)]
x, ws = step(x, ws, 0)
with program.work(lambda: jax.block_until_ready((x, ws))):
    for i in range(program.steps(1600)): x, ws = step(x, ws, i)
device = jax.local_devices()[0]
pool = round((device.memory_stats() or {}).get("bytes_limit", 0) / 2**30, 2)
wanted = float(os.environ.get("POOL_GIB", 0))
program.tell(program.digest(*[jax.device_get(a) for a in (x, *ws)]), ok=device.platform == "gpu" and (not wanted or abs(pool / wanted - 1) < 0.1), pool_gib=pool, platform=device.platform)
