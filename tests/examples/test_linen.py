"""Attention Residuals in a model written in Linen, through Flax's bridge.

`to_linen` turns `ResidualModule` into a Linen submodule with the same moves; its parameters stand
in the Linen tree like any others. `metadata_fn=None` leaves them plain arrays without boxes.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

from depthjax.residuals import BlockAttnRes, ResidualModule

pytestmark = pytest.mark.jax_version

VOCAB, WIDTH, LAYERS = 41, 16, 2


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, ids):
        residual = nnx.bridge.to_linen(
            ResidualModule,
            BlockAttnRes(block_size_sublayers=2),
            layers=LAYERS,
            width=WIDTH,
            metadata_fn=None,
            name="residual",
        )
        mask = nn.make_causal_mask(ids)
        state = residual.begin(nn.Embed(VOCAB, WIDTH)(ids))
        for layer in range(LAYERS):
            x, _, state = residual.read(state, 2 * layer)
            attended = nn.MultiHeadDotProductAttention(num_heads=2)(x, mask=mask)
            state = residual.write(state, attended, 2 * layer)
            x, _, state = residual.read(state, 2 * layer + 1)
            hidden = nn.gelu(nn.Dense(4 * WIDTH)(x))
            state = residual.write(state, nn.Dense(WIDTH)(hidden), 2 * layer + 1)
        return nn.Dense(VOCAB)(residual.finish(state))


@pytest.fixture(scope="module")
def ids():
    first = jax.random.randint(jax.random.key(0), (8, 1), 0, VOCAB)
    return (first + jnp.arange(9)) % VOCAB


@pytest.fixture(scope="module")
def params(ids):
    return Transformer().init(jax.random.key(1), ids)["params"]


@jax.jit
def loss_and_gradients(params, ids):
    def loss(params):
        logits = Transformer().apply({"params": params}, ids)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    return jax.value_and_grad(loss)(params)


def test_parameters_stand_in_the_linen_tree(params):
    shapes = jax.tree.map(jnp.shape, params["residual"])
    mixer = {"norm": (LAYERS, WIDTH), "query": (LAYERS, WIDTH), "key_scale": (LAYERS, WIDTH)}
    # The first attention reads the embedding alone and has no mixer.
    first = {**mixer, "query": (LAYERS - 1, WIDTH), "key_scale": (LAYERS - 1, WIDTH)}
    final = {"norm": (WIDTH,), "query": (WIDTH,), "key_scale": (WIDTH,)}
    assert shapes == {"attention": first, "mlp": mixer, "final": final}


def test_gradients_reach_every_query(params, ids):
    _, gradients = loss_and_gradients(params, ids)
    for reader in gradients["residual"].values():
        assert jnp.all(jnp.any(reader["query"] != 0, axis=-1))
        assert jnp.all(jnp.any(reader["norm"] != 0, axis=-1))


def test_training_lowers_the_loss(params, ids):
    adam, losses = optax.adam(1e-2), []
    moments = adam.init(params)
    for _ in range(8):
        loss, gradients = loss_and_gradients(params, ids)
        updates, moments = adam.update(gradients, moments, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
