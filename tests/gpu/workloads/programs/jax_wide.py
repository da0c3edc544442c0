#!/usr/bin/env python3
"""JAX, broadly: training with flax and optax, scans, FFT, linear algebra, host callbacks, donated buffers, an ahead-of-time program, a profile."""
import tempfile, program
program.need("jax", "flax", "optax")
import jax, jax.numpy as jnp, numpy as np, optax, flax.linen as nn
seen = {}
def close(name, a, b, by=1e-2): seen[name] = bool(jnp.abs(a - b).max() <= by * (1 + jnp.abs(b).max()))
class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(32, (3, 3))(x)); x = nn.LayerNorm()(x).reshape(x.shape[0], -1)
        return nn.Dense(10)(nn.relu(nn.Dense(256)(x)))
def training():
    key = jax.random.key(1); x, y = jax.random.normal(key, (256, 28, 28, 1)), jax.random.randint(key, (256,), 0, 10)
    net = Net(); params = net.init(key, x); adam = optax.adam(1e-3); state = adam.init(params)
    def loss(p): return optax.softmax_cross_entropy_with_integer_labels(net.apply(p, x), y).mean()
    @jax.jit
    def step(p, s):
        v, g = jax.value_and_grad(loss)(p); u, s = adam.update(g, s); return optax.apply_updates(p, u), s, v
    params, state, first = step(params, state)
    for _ in range(program.steps(100)): params, state, last = step(params, state)
    seen["learns"] = bool(last < first / 2)
def algebra():
    a = jax.random.normal(jax.random.key(2), (512, 512)); s = a @ a.T + 512 * jnp.eye(512)
    w, v = jnp.linalg.eigh(s); close("eigh", v @ jnp.diag(w) @ v.T, s); close("solve", s @ jnp.linalg.solve(s, a), a); q, r = jnp.linalg.qr(a); close("qr", q @ r, a)
    close("fft", jnp.fft.ifft(jnp.fft.fft(a)).real, a); seen["sort"] = bool((jnp.diff(jnp.sort(a.ravel())) >= 0).all())
    c = jax.lax.scan(lambda c, x: ((c + x) % 1000003, None), jnp.int32(0), jnp.arange(10000, dtype=jnp.int32))[0]; seen["scan"] = int(c)
    seen["conv"] = float(jax.lax.conv(jnp.ones((8, 16, 32, 32)), jnp.ones((32, 16, 3, 3)), (1, 1), "SAME")[0, 0, 5, 5])
def outside():
    f = jax.jit(lambda x: jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct((1000,), jnp.float32), x) + 1); seen["callback"] = float(f(jnp.ones(1000)).sum())
    aot = jax.jit(lambda x: x @ x).lower(jax.ShapeDtypeStruct((256, 256), jnp.float32)).compile(); seen["aot"] = float(aot(jnp.eye(256)).sum())
    seen["memory"] = aot.memory_analysis() is not None; x = jnp.arange(1 << 24); b = np.asarray(x); seen["numpy"] = int(b[-1])
    y = jax.device_put(np.arange(1000), jax.local_devices()[0], may_alias=False); seen["put"] = int(y.sum()); seen["dlpack"] = int(jnp.from_dlpack(y).sum())
    with tempfile.TemporaryDirectory() as d:
        with jax.profiler.trace(d): jax.block_until_ready(jnp.ones((512, 512)) @ jnp.ones((512, 512)))
    try: jax.block_until_ready(jnp.zeros((1 << 43,), jnp.uint8)); seen["oom"] = "none"
    except Exception as e: seen["oom"] = "RESOURCE_EXHAUSTED" in str(e) or str(e)[:80]
with program.work(lambda: None):
    for part in (training, algebra, outside): part()
print(seen, file=__import__("sys").stderr)
program.tell(str(seen), ok=all(v is not False for v in seen.values()), seen={k: v for k, v in seen.items() if v is False or isinstance(v, str)})
