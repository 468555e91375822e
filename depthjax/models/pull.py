"""Depth as one scan over one buffer, for variants that can gather (see `residuals.base.Pull`)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from depthjax.models.keep import Remat, full, recompute, thin
from depthjax.models.sublayers import LayerParams, Sublayers, differentiable, vjp
from depthjax.residuals import ATTENTION, KINDS, MLP
from depthjax.residuals.base import Pull


def scan_by_pull(
    sublayers: Sublayers,
    pull: Pull,
    params: LayerParams,
    final: Any,
    embedding: jax.Array,
    remat: Remat,
) -> tuple[jax.Array, Any]:
    """From the embedding [..., D] to what the head reads, and what was observed: as `run_depth`.

    The buffer holds every sublayer's input, so no policy keeps a carry beside it.
    """

    def forward(params, final, embedding):
        layers = jax.tree.leaves(params)[0].shape[0]
        directions = pull.directions(params.residual, final)

        def layer(rows, inputs):
            index, params = inputs
            lses, kept, seen = [], [], []
            for kind in (ATTENTION, MLP):
                s = 2 * index + kind
                seen.append(_observe(sublayers, pull, params.residual[KINDS[kind]], rows, s, s))
                mixture, lse = pull.mix(rows, s, directions[s])
                step = _Sublayer(sublayers, pull, remat, kind, params, s, embedding)
                y, pullback = step.run(mixture)
                rows = jax.lax.dynamic_update_index_in_dim(rows, y, s + 1, 0)
                lses.append(lse)
                kept.append(pullback)
            seen = jax.tree.map(lambda *both: jnp.stack(both), *seen)
            return rows, (jnp.stack(lses), kept, seen)

        rows = jnp.zeros_like(embedding, shape=(2 * layers + 1, *embedding.shape))
        rows = rows.at[0].set(embedding)
        inputs = (jnp.arange(layers, dtype=jnp.int32), params)
        rows, (lse, kept, seen) = jax.lax.scan(layer, rows, inputs)
        lse, seen = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (lse, seen))
        if sublayers.observer is not None:
            seen = seen, _observe(sublayers, pull, final, rows, 2 * layers, None)
        mixture, last = pull.mix(rows, 2 * layers, directions[-1])
        features = pull.normalize(final, mixture, 2 * layers, embedding)
        return (features, seen), (rows, jnp.concatenate([lse, last[None]]), kept)

    @jax.custom_vjp
    def run(params, final, embedding):
        return forward(params, final, embedding)[0]

    def run_forward(params, final, embedding):
        result, kept = forward(params, final, embedding)
        return result, (params, final, *kept)

    def run_backward(residuals, cotangents):
        return _backward(sublayers, pull, remat, *residuals, cotangents[0])

    run.defvjp(run_forward, run_backward)
    return run(params, final, embedding)


def _backward(sublayers, pull, remat, params, final, rows, lse, kept, d_features):
    """Cotangents of (params, final, embedding)."""
    last_reader = rows.shape[0] - 1
    directions, pull_directions = vjp(pull.directions, params.residual, final)

    mixture, _ = pull.mix(rows, last_reader, directions[-1])
    normalize = lambda final, mixture: pull.normalize(final, mixture, last_reader, rows)  # noqa: E731
    d_final, d_mixture = vjp(normalize, final, mixture)[1](d_features)
    last = d_mixture.astype(rows.dtype)
    delta = jnp.zeros_like(lse).at[-1].set(_product(last, mixture))

    def gather(rows, index, delta, d_directions):
        found, share = pull.gather(rows, index, last, directions, lse, delta)
        return found.astype(rows.dtype), d_directions + share

    def layer(carry, inputs):
        rows, delta, d_directions, d_params = carry
        index, params, kept = inputs
        for kind in (MLP, ATTENTION):
            s = 2 * index + kind
            dy, d_directions = gather(rows, s + 1, delta, d_directions)
            mixture, _ = pull.mix(rows, s, directions[s])
            step = _Sublayer(sublayers, pull, remat, kind, params, s, rows)
            d_own, d_mixture = step.pull(mixture, kept[kind], dy)
            d_mixture = d_mixture.astype(rows.dtype)
            d_params, d_mixture = d_params.stored(kind, index, d_own, d_mixture)
            # Without it the buffer takes the layout that the last product likes, by a copy a layer.
            d_mixture = _row_major(d_mixture)
            delta = delta.at[s].set(_product(d_mixture, mixture))
            rows = _row_major(jax.lax.dynamic_update_index_in_dim(rows, d_mixture, s + 1, 0))
        return (rows, delta, d_directions, d_params), None

    zeros = jax.tree.map(jnp.zeros_like, differentiable(params))
    carry = (rows, delta, jnp.zeros_like(directions), zeros)
    inputs = (jnp.arange(last_reader // 2, dtype=jnp.int32), params, kept)
    (rows, delta, d_directions, d_params), _ = jax.lax.scan(layer, carry, inputs, reverse=True)
    d_embedding, d_directions = gather(rows, 0, delta, d_directions)
    d_residual, more_final = pull_directions(d_directions)
    d_residual = jax.tree.map(jnp.add, d_params.residual, d_residual)
    d_final = jax.tree.map(jnp.add, d_final, more_final)
    return d_params._replace(residual=d_residual), d_final, d_embedding


class _Sublayer:
    """A sublayer from its mixture to its output."""

    def __init__(self, sublayers, pull, remat, kind, params, s, like):
        self.remat, self.params = remat, params.of(kind)

        def normalize(params, mixture):
            return pull.normalize(params.residual[KINDS[kind]], mixture, s, like)

        def branch(params, x):
            return sublayers.branch(kind, params, x, None)[0]

        self.normalize, self.branch = normalize, recompute(branch, remat)

    def run(self, mixture):
        """(y, what the backward pass needs of the branch)."""
        x = self.normalize(self.params, mixture)
        if not self.remat.keeps_branches:
            return self.branch(self.params, x), None
        y, pullback = vjp(self.branch, self.params, x)
        return y, thin(pullback, differentiable((self.params, x)))

    def pull(self, mixture, kept, dy):
        """(d_params, d_mixture) from dy."""
        x, pull_normalize = vjp(self.normalize, self.params, mixture)
        if kept is None:
            pullback = vjp(self.branch, self.params, x)[1]
        else:
            pullback = full(kept, differentiable((self.params, x)))
        d_params, dx = pullback(dy)
        more, d_mixture = pull_normalize(dx)
        return jax.tree.map(jnp.add, d_params, more), d_mixture


def _observe(sublayers, pull, params, rows, reader, s):
    """What is seen in front of `reader`, which an observer knows as s."""
    if sublayers.observer is None:
        return None
    return sublayers.observer(sublayers.rule, params, *pull.state(rows, reader), s)


def _product(a, b):
    """[...] from two [..., D], in at least fp32."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.sum(a.astype(wide) * b.astype(wide), axis=-1)


def _row_major(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
