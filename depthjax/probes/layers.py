"""What a layer is as a map: usefulness (is an affine map as good?) and Jacobian."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from depthjax.models import Transformer
from depthjax.probes.fold import Batches, Fold, on_rows, zeros
from depthjax.probes.walk import (
    NONE,
    at_boundaries,
    depth_of,
    summed_loss,
    walk,
    where,
)

SIGNIFICANT = 1.1
"""A layer is useful if the loss with its affine stand-in is over so many times the baseline."""

NEGLIGIBLE = 1e-7
"""Directions with less than this share of the largest variance are not fitted: fp32 holds no more
of them than rounding."""


def usefulness(batches: Batches) -> Fold:
    """linear_loss [L] with one layer replaced by the affine map that fits it best in least squares,
    baseline_loss [], ratio [L] of the two, and score [], the share of layers whose ratio is over
    1.1 (Csordas et al. 2025; DepthBench, section 7). Streams are fitted as rows of their own.

    First the moments of all layers are summed, then each layer is replaced.
    """
    layers, width = batches.shape.layers, batches.shape.width
    fitted: dict[int, np.ndarray] = {}

    def step(k, sums):
        if k < len(batches):
            for name, value in batches.call(_moments, k).items():
                sums[name] += value
            return
        layer, batch = divmod(k - len(batches), len(batches))
        layer = layer if layer < layers else NONE  # the last entry is the baseline
        if layer not in fitted:
            fitted.clear()
            fitted[layer] = _affine(sums["inputs"][layer], sums["updates"][layer])
        sums["loss"][layer] += batches.call(_affine_loss, batch, layer, fitted[layer])

    def result(sums):
        *loss, baseline = sums["loss"] / batches.predictions
        ratio = loss / baseline
        useful = np.mean(ratio > SIGNIFICANT)
        return {
            "linear_loss": np.array(loss),
            "baseline_loss": baseline,
            "ratio": ratio,
            "score": useful,
        }

    start = zeros(
        inputs=(layers, width + 1, width + 1),
        updates=(layers, width + 1, width),
        loss=(layers + 1,),
    )
    return Fold(start, (layers + 2) * len(batches), step, result)


def _affine(inputs: np.ndarray, updates: np.ndarray) -> np.ndarray:
    """fp32 [D + 1, D]: the map of [x, 1] that fits y - x, from their second moments. Features count
    in units of their own size, or one that is far larger would leave no other to fit."""
    size = np.sqrt(np.diag(inputs))
    scale = np.divide(1, size, out=np.zeros_like(size), where=size > 0)[:, None]
    fit = np.linalg.lstsq(scale * inputs * scale.T, scale * updates, rcond=NEGLIGIBLE)[0]
    return (scale * fit).astype(np.float32)


def _with_ones(x: jax.Array) -> jax.Array:
    return jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1)


def _tensors(model: Transformer, ids) -> jax.Array:
    """fp32 [L + 1, ..., D]: what is handed on at each boundary of layers."""

    def look(rule, params, final, carry, history, s):
        return rule.layer_tensor(carry).astype(jnp.float32)

    return at_boundaries(model, ids, look)[0]


@on_rows
def _moments(model: Transformer, ids, real):
    """Second moments {"inputs": [L, D + 1, D + 1], "updates": [L, D + 1, D]} of [x, 1] with itself
    and with y - x, of the input x and output y of each layer. Rows are [..., B, T, D]."""
    tensors = _tensors(model, ids)
    x = jnp.where(real[:, None, None], _with_ones(tensors[:-1]), 0)
    product = functools.partial(jnp.einsum, "l...i,l...j->lij", precision="highest")
    return {"inputs": product(x, x), "updates": product(x, jnp.diff(tensors, axis=0))}


@on_rows
def _affine_loss(model: Transformer, ids, real, replaced, matrix):
    """The summed loss with one layer replaced. It leaves no history of its own, and what came
    before it is lost too, as in the study's script."""
    depth = depth_of(model)
    rule = depth.rule

    def layer(state, index, params):
        after = depth.advance(state, index, params)
        x = rule.layer_tensor(state[0])
        update = jnp.matmul(_with_ones(x.astype(jnp.float32)), matrix, precision="highest")
        carry = rule.with_layer_tensor(after[0], (x + update).astype(x.dtype))
        stand_in = carry, jax.tree.map(jnp.zeros_like, state[1])
        return where(index == replaced, stand_in, after), None

    state, _ = walk(model, depth, ids, layer)
    return summed_loss(model, rule.finish(depth.final, *state), ids, real)


def jacobian_norms(batches: Batches) -> Fold:
    """norms [L]: |J - I|_F / sqrt(D) with J[in, out] = the mean over positions t of the derivative
    of sum_t' y[t', out] by x[t, in], of the input x and output y of a layer (DepthBench, section
    7).

    D backward passes a layer and micro-batch.
    """
    layers, width = batches.shape.layers, batches.shape.width

    def step(k, sums):
        layer, batch = divmod(k, len(batches))
        sums["jacobian"][layer] += batches.call(_jacobian, batch, layer)

    def result(sums):
        jacobian = sums["jacobian"] / batches.tokens
        norms = np.linalg.norm(jacobian - np.eye(width), axis=(1, 2))
        return {"norms": norms / np.sqrt(width)}

    start = zeros(jacobian=(layers, width, width))
    return Fold(start, layers * len(batches), step, result)


@on_rows
def _jacobian(model: Transformer, ids, real, chosen):
    """[D, D]: J of layer `chosen`, summed over positions."""
    depth = depth_of(model)
    rule = depth.rule

    def layer(state, index, params):
        return where(index < chosen, depth.advance(state, index, params), state), None

    (carry, history), _ = walk(model, depth, ids, layer)
    own = jax.tree.map(lambda leaf: leaf[chosen], depth.params)

    def through(x):
        state = rule.with_layer_tensor(carry, x), history
        return rule.layer_tensor(depth.advance(state, chosen, own)[0])

    x = rule.layer_tensor(carry)
    _, pull = jax.vjp(through, x)

    def column(out):
        # Where XLA for CPUs sees that it is the same for all tokens, static streams come out wrong.
        of_y = jax.lax.optimization_barrier(jnp.broadcast_to(out, x.shape).astype(x.dtype))
        (d_x,) = pull(of_y)
        d_x = jnp.where(real[:, None, None], d_x.astype(jnp.float32), 0)
        d_x = jnp.sum(d_x, axis=(-3, -2))
        return jnp.mean(d_x, axis=tuple(range(d_x.ndim - 1)))  # [in]; over streams, if any

    return jax.lax.map(column, jnp.eye(x.shape[-1], dtype=jnp.float32)).T
