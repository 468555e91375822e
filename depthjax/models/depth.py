"""The loop over depth: read -> branch -> write for 2L sublayers, as one scan or unrolled."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from depthjax.residuals import ATTENTION, KINDS, MLP, Residual, append
from depthjax.residuals.base import State

Branch = Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]]
Observer = Callable[[Residual, Any, Any, Any, Any], Any]


@jax.custom_vjp
def tap(y: jax.Array, meter: jax.Array) -> jax.Array:
    """y itself; the cotangent of the scalar `meter` is the sum of squares of the cotangent of y."""
    return y


def _tap_forward(y, meter):
    return y, None


def _tap_backward(_, cotangent):
    wide = cotangent.astype(jnp.promote_types(cotangent.dtype, jnp.float32))
    return cotangent, jnp.sum(wide * wide).astype(jnp.float32)


tap.defvjp(_tap_forward, _tap_backward)


def run_depth(
    rule: Residual,
    branches: tuple[Branch, Branch],
    residual_params: dict[str, Any],
    branch_params: tuple[Any, Any],
    state: State,
    *,
    layers: int,
    unroll: bool = False,
    remat: bool = False,
    skip: jax.Array | int | None = None,
    meters: jax.Array | None = None,
    observer: Observer | None = None,
) -> tuple[State, Any]:
    """Takes the depth state through all layers.

    residual_params: {"attention", "mlp"} of arrays [L, ...]; branch_params: one pytree of arrays
    [L, ...] a kind; branches: functions (params of one layer, x, ctx) -> (y, aux).
    unroll: a Python loop over layers instead of a scan. remat: recompute each layer in the backward
    pass. skip: leave out this layer (may be traced). meters: [L, 2] zeros, whose gradient is the
    sum of squares of the gradient at each branch output. observer: called before each read as
    observer(rule, params, carry, history, s); what it returns is stacked to [2L, ...]. Returns the
    state before the final read, and the observations (None without an observer).
    """

    def layer(state: State, inputs):
        index, residual, branch, meter = inputs
        before, (carry, history), seen = state, state, []
        for kind in (ATTENTION, MLP):
            s, params = 2 * index + kind, residual[KINDS[kind]]
            if observer is not None:
                seen.append(observer(rule, params, carry, history, s))
            x, ctx, carry, history = rule.read(params, carry, history, s)
            y, aux = branches[kind](branch[kind], x, ctx)
            if meter is not None:
                y = tap(y, meter[kind])
            carry, appended = rule.write(params, carry, y, aux, s)
            history = append(history, appended)
        after = (carry, history)
        if skip is not None:
            skipped = rule.skip(before, after, 2 * index)
            after = jax.tree.map(lambda a, b: jnp.where(index == skip, a, b), skipped, after)
        return after, jax.tree.map(lambda *both: jnp.stack(both), *seen) if seen else None

    if remat:
        layer = jax.checkpoint(layer, prevent_cse=unroll)
    per_layer = {kind: residual_params[kind] for kind in KINDS}
    inputs = (jnp.arange(layers, dtype=jnp.int32), per_layer, branch_params, meters)
    if unroll:
        seen = []
        for index in range(layers):
            _, *rest = jax.tree.map(lambda leaf: leaf[index], inputs)  # noqa: B023
            state, observed = layer(state, (index, *rest))
            seen.append(observed)
        observed = jax.tree.map(lambda *all_layers: jnp.stack(all_layers), *seen)
    else:
        state, observed = jax.lax.scan(layer, state, inputs)
    return state, jax.tree.map(lambda leaf: leaf.reshape(2 * layers, *leaf.shape[2:]), observed)
