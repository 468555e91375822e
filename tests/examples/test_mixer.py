"""A stack that is no transformer: an MLP-Mixer on image patches (Tolstikhin et al. 2021).

Its two sublayers a layer, token mixing and channel mixing, take the places of attention and MLP:
any variant whose reads need no keys or values from attention works, here two very different ones.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from depthjax.residuals import HC, BlockAttnRes, ResidualModule

PATCHES, WIDTH, LAYERS, CLASSES = 16, 24, 3, 4
every_rule = pytest.mark.parametrize("rule", [BlockAttnRes(), HC(streams=2)], ids=lambda r: r.name)


class MixerMLP(nnx.Module):
    """Mixes one axis of [B, patches, D]: 1, the patches, or 2, the channels."""

    def __init__(self, axis: int, size: int, rngs: nnx.Rngs):
        self.axis = axis
        self.up = nnx.Linear(size, 2 * size, rngs=rngs)
        self.down = nnx.Linear(2 * size, size, rngs=rngs)

    def __call__(self, x):
        x = jnp.moveaxis(x, self.axis, -1)
        return jnp.moveaxis(self.down(jax.nn.gelu(self.up(x))), -1, self.axis)


class Mixer(nnx.Module):
    """Images [B, 16, 16, 3], in 16 patches of 4 x 4, -> logits [B, classes]."""

    def __init__(self, rule, rngs: nnx.Rngs):
        self.embed = nnx.Conv(3, WIDTH, (4, 4), strides=(4, 4), rngs=rngs)
        axes = [(1, PATCHES), (2, WIDTH)] * LAYERS
        self.branches = nnx.List([MixerMLP(axis, size, rngs) for axis, size in axes])
        self.residual = ResidualModule(rule, layers=LAYERS, width=WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def features(self, images):
        """[B, patches, D]."""
        x = self.embed(images)
        state = self.residual.begin(x.reshape(len(x), PATCHES, WIDTH))
        for s, branch in enumerate(self.branches):
            u, _, state = self.residual.read(state, s)
            state = self.residual.write(state, branch(u), s)
        return self.residual.finish(state)

    def __call__(self, images):
        return self.head(jnp.mean(self.features(images), axis=1))


def images():
    """Noise with a bright quarter, whose place is the class."""
    labels = jnp.arange(8) % CLASSES
    quarters = jax.nn.one_hot(labels, CLASSES).reshape(8, 2, 2, 1)
    bright = jnp.repeat(jnp.repeat(quarters, 8, axis=1), 8, axis=2)
    return bright + 0.1 * jax.random.normal(jax.random.key(0), (8, 16, 16, 3)), labels


@every_rule
def test_learns_where_the_bright_quarter_is(rule):
    model, (pixels, labels) = Mixer(rule, nnx.Rngs(0)), images()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            logits = model(pixels)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    losses = [float(step(model, optimizer)) for _ in range(20)]
    assert losses[-1] < 0.3 * losses[0]


@every_rule
def test_every_patch_reaches_every_other(rule):
    """Only token mixing carries information between patches."""
    model = Mixer(rule, nnx.Rngs(0))
    gradient = jax.jit(jax.grad(lambda pixels: jnp.sum(model.features(pixels)[:, 5] ** 3)))
    by_patch = np.abs(gradient(images()[0])).reshape(8, 4, 4, 4, 4, 3).sum(axis=(2, 4, 5))
    assert np.all(by_patch > 0)
