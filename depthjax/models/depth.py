"""The loop over depth: begin, then read -> branch -> write for 2 L sublayers, then finish."""

from typing import Any

import jax
import jax.numpy as jnp

from depthjax.kernels.layout import spread_state
from depthjax.models.keep import KEEP_ALL, Remat
from depthjax.models.pull import scan_by_pull
from depthjax.models.sublayers import LayerParams, Sublayers
from depthjax.models.vjp import scan_layers


def run_depth(
    sublayers: Sublayers,
    residual_params: dict[str, Any],
    branch_params: tuple[Any, Any],
    embedding: jax.Array,
    *,
    layers: int,
    remat: Remat = KEEP_ALL,
    unroll: bool = False,
    skip: jax.Array | int | None = None,
    meters: jax.Array | None = None,
    auxiliary: bool = False,
) -> tuple[jax.Array, Any, Any]:
    """From the embedding [..., D] to what the head reads [..., D], what was observed, and what the
    branches left.

    residual_params: {"attention", "mlp"} of arrays [L, ...], and {"final"}; branch_params: one
    pytree of arrays [L, ...] a kind. remat: what the backward pass recomputes. unroll: a Python
    loop over layers instead of a scan, differentiated plainly. skip: leave out this layer (may be
    traced; differentiated plainly). meters: [L, 2] zeros, whose gradient is the sum of squares of
    the gradient at each branch output. Observed: (of the 2 L sublayers, stacked [2 L, ...]; of the
    final read, s = None); None without an observer; no gradient comes from it. Left: where
    `auxiliary` asks for it (differentiated plainly), the aux of the branches, (of attention, of the
    MLP), stacked [L, ...]; else None.
    """
    rule, final = sublayers.rule, residual_params["final"]
    params = LayerParams.stacked(residual_params, branch_params, meters)
    plain = unroll or skip is not None or auxiliary
    pull = None if plain else rule.pull()
    if pull is not None:
        features, seen = scan_by_pull(sublayers, pull, params, final, embedding, remat)
        return features, jax.lax.stop_gradient(seen), None
    state, left = spread_state(lambda x: rule.begin(x, layers), embedding), None
    if plain:
        state, seen, left = _loop(sublayers, params, state, layers, unroll, skip)
    else:
        state, seen = scan_layers(sublayers, params, state, 0, remat)
    if sublayers.observer is not None:
        seen = seen, sublayers.observer(rule, final, *state, None)
    left = left if auxiliary else None
    return rule.finish(final, *state), jax.lax.stop_gradient(seen), left


def _loop(sublayers: Sublayers, params: LayerParams, state, layers: int, unroll: bool, skip):
    """(state, observed, left) behind all layers, as JAX itself differentiates them."""

    def layer(state, inputs):
        index, params = inputs
        after, seen, left = sublayers.layer(params, state, index)
        if skip is not None:
            skipped = sublayers.rule.skip(state, after, 2 * index)
            after = jax.tree.map(lambda a, b: jnp.where(index == skip, a, b), skipped, after)
        return after, (seen, left)

    inputs = (jnp.arange(layers, dtype=jnp.int32), params)
    if not unroll:
        state, (seen, left) = jax.lax.scan(layer, state, inputs)
        return state, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), seen), left
    observed, lefts = [], []
    for index in range(layers):
        own = jax.tree.map(lambda leaf: leaf[index], params)  # noqa: B023
        state, (seen, left) = layer(state, (index, own))
        observed.append(seen)
        lefts.append(left)
    seen = jax.tree.map(lambda *all_layers: jnp.concatenate(all_layers), *observed)
    return state, seen, jax.tree.map(lambda *all_layers: jnp.stack(all_layers), *lefts)
