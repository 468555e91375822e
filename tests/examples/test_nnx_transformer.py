"""A transformer in NNX that has its own attention and MLP, switched to Block Attention Residuals.

`PlainTransformer` computes x = x + branch(norm(x)). `DepthTransformer` differs in five lines: one
`ResidualModule`, which also holds the norms, takes the place of the norms and of the sum.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from depthjax.residuals import BlockAttnRes, ResidualModule

pytestmark = pytest.mark.jax_version

VOCAB, WIDTH, HEADS, LAYERS = 67, 32, 4, 3
UNIT = jax.nn.initializers.normal(1)


class Attention(nnx.Module):
    """Causal self-attention, [B, T, D] -> [B, T, D]."""

    def __init__(self, rngs: nnx.Rngs):
        self.project = nnx.LinearGeneral(WIDTH, (3, HEADS, WIDTH // HEADS), rngs=rngs)
        self.out = nnx.LinearGeneral((HEADS, WIDTH // HEADS), WIDTH, axis=(-2, -1), rngs=rngs)

    def __call__(self, x):
        q, k, v = jnp.moveaxis(self.project(x), -3, 0)
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True))


class MLP(nnx.Module):
    """Two layers with a GELU, [..., D] -> [..., D]."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x)))


class PlainTransformer(nnx.Module):
    """Before: a Pre-LN stream."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, embedding_init=UNIT, rngs=rngs)
        branches = [kind(rngs) for _ in range(LAYERS) for kind in (Attention, MLP)]
        self.branches = nnx.List(branches)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in branches])
        self.final_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        for norm, branch in zip(self.norms, self.branches, strict=True):
            x = x + branch(norm(x))
        return self.head(self.final_norm(x))


class DepthTransformer(nnx.Module):
    """After: each branch reads a mixture over depth."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, embedding_init=UNIT, rngs=rngs)
        branches = [kind(rngs) for _ in range(LAYERS) for kind in (Attention, MLP)]
        self.branches = nnx.List(branches)
        rule = BlockAttnRes(block_size_sublayers=2)
        self.residual = ResidualModule(rule, layers=LAYERS, width=WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, ids):
        state = self.residual.begin(self.embed(ids))
        for s, branch in enumerate(self.branches):
            x, _, state = self.residual.read(state, s)
            state = self.residual.write(state, branch(x), s)
        return self.head(self.residual.finish(state))


def switch(plain: PlainTransformer) -> DepthTransformer:
    """A trained plain model as the start of one with Attention Residuals."""
    model = DepthTransformer(nnx.Rngs(0))
    for name in ("embed", "branches", "head"):
        setattr(model, name, getattr(plain, name))
    scales = jnp.stack([norm.scale[...] for norm in plain.norms])
    model.residual.attention["norm"][...] = scales[0::2]
    model.residual.mlp["norm"][...] = scales[1::2]
    model.residual.final["norm"][...] = plain.final_norm.scale[...]
    return model


def batch():
    """Sequences that count up from a random id, so that the next id can be learned."""
    first = jax.random.randint(jax.random.key(0), (8, 1), 0, VOCAB)
    return (first + jnp.arange(12)) % VOCAB


def loss_of(model, ids):
    logits = model(ids)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


def test_switching_changes_nothing_at_first():
    """Queries start at zero: a mixture is then the mean of its sources, which the norm behind it
    cannot tell from their sum, except for its epsilon."""
    plain = PlainTransformer(nnx.Rngs(1))
    for i, norm in enumerate([*plain.norms, plain.final_norm]):
        norm.scale[...] += 0.3 * jax.random.normal(jax.random.key(i), WIDTH)
    model, logits = switch(plain), nnx.jit(lambda model, ids: model(ids))
    expected = logits(plain, batch())
    np.testing.assert_allclose(logits(model, batch()), expected, rtol=0, atol=1e-4)
    model.residual.mlp["query"][...] += 1.0
    assert np.max(np.abs(logits(model, batch()) - expected)) > 0.1


def test_trains_with_nnx_jit():
    model, traces = DepthTransformer(nnx.Rngs(0)), []
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, ids):
        traces.append(ids.shape)
        loss, gradients = nnx.value_and_grad(loss_of)(model, ids)
        optimizer.update(model, gradients)
        return loss

    losses = [float(step(model, optimizer, batch())) for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0]
    assert len(traces) == 1
    assert np.all(np.any(model.residual.mlp["query"][...] != 0, axis=-1))


def test_trains_with_jax_jit_on_split_state():
    graph, params = nnx.split(DepthTransformer(nnx.Rngs(0)))
    adam, traces = optax.adam(3e-3), []

    @jax.jit
    def step(params, moments, ids):
        traces.append(ids.shape)
        loss, gradients = jax.value_and_grad(lambda p: loss_of(nnx.merge(graph, p), ids))(params)
        updates, moments = adam.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    moments, losses = adam.init(params), []
    for _ in range(8):
        params, moments, loss = step(params, moments, batch())
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
    assert len(traces) == 1
