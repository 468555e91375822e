"""The recipe against its definition, and AdamW against torch's order of operations in NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from depthjax.config import TrainConfig
from depthjax.models import Shape, Transformer
from depthjax.residuals import BlockAttnRes
from depthjax.train.optimizer import adamw, clip, decay_mask, learning_rate


@pytest.mark.parametrize(("steps", "warmup"), [(7600, 760), (50, 5), (10, 0), (10, 10)])
def test_learning_rate(steps, warmup):
    """DepthBench, "training recipe", at every 1-based step and beyond the last."""
    train = TrainConfig(steps=steps, peak_lr=2e-3)

    def published(k):
        if k < warmup:
            return 2e-3 * k / warmup
        if k < steps:
            angle = math.pi * (k - warmup) / (steps - warmup)
            return 0.1 * 2e-3 + 0.9 * 2e-3 * (1 + math.cos(angle)) / 2
        return 0.1 * 2e-3

    ks = np.arange(1, steps + 5)
    rates = jax.vmap(lambda k: learning_rate(k, train, warmup))(ks)
    np.testing.assert_allclose(rates, [published(int(k)) for k in ks], rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("decay_vectors", [False, True])
def test_what_is_decayed(decay_vectors):
    """Matrices always; norms and depth queries only in the authors' recipe."""
    shape = Shape(layers=2, width=8, heads=2, kv_heads=2, mlp_width=16)
    model = Transformer(shape, 11, BlockAttnRes(), rngs=nnx.Rngs(0))
    mask = decay_mask(nnx.state(model, nnx.Param), decay_vectors)
    flat = {"/".join(k.key for k in path): v for path, v in jax.tree.leaves_with_path(mask)}
    vectors = {name for name in flat if name.startswith("residual/")}
    assert len(vectors) == 9
    assert all(value is (decay_vectors or name not in vectors) for name, value in flat.items())


def test_adamw_as_torch_computes_it():
    """p <- p (1 - lr wd); p <- p - lr m^ / (sqrt(v^) + eps), after clipping by the global norm."""
    rng = np.random.default_rng(0)
    train = TrainConfig(weight_decay=0.1, clip_norm=1.0)
    value, m, v = rng.normal(size=(3, 4)), np.zeros((3, 4)), np.zeros((3, 4))
    params = {"w": jnp.asarray(value, jnp.float32)}
    optimizer = adamw(train, {"w": True})
    state = optimizer.init(params)
    for step in range(1, 8):
        gradient, rate = rng.normal(size=(3, 4)) * step / 3, 1e-2 / step
        clipped, norm = clip({"w": jnp.asarray(gradient, jnp.float32)}, train.clip_norm)
        np.testing.assert_allclose(norm, np.linalg.norm(gradient), rtol=1e-5)
        updates, state = optimizer.update(clipped, state, params)
        params = optax.apply_updates(params, jax.tree.map(lambda u, r=rate: -r * u, updates))

        gradient = gradient / max(1.0, np.linalg.norm(gradient))
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        value = value * (1 - rate * 0.1)
        direction = m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)
        value = value - rate * direction
        np.testing.assert_allclose(params["w"], value, rtol=1e-5, atol=1e-6)
