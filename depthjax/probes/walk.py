"""One forward pass through the moves of the residual protocol, with a look at each layer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from depthjax.models import Transformer
from depthjax.models.sublayers import LayerParams, Sublayers
from depthjax.residuals import KINDS, Residual, swap_rows
from depthjax.residuals.base import State

NONE = -1
"""Instead of the index of a layer: no layer. As it is traced, one program serves both."""


class Depth(NamedTuple):
    """A model, taken apart."""

    sublayers: Sublayers
    params: LayerParams
    final: Any
    """Parameters of the final read."""
    layers: int

    @property
    def rule(self) -> Residual:
        return self.sublayers.rule

    def advance(self, state: State, index, params: LayerParams, skip=NONE) -> State:
        """The state behind layer `index`, left out where it is `skip`."""
        after, _, _ = self.sublayers.layer(params, state, index)
        skipped = self.rule.skip(state, after, 2 * index)
        return where(index == skip, skipped, after)


def where(condition, a: State, b: State) -> State:
    """a where the scalar holds, else b, leaf by leaf."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def depth_of(model: Transformer, swap=None, swap_routing=None, observer=None) -> Depth:
    """The model with two layers exchanged, or the connectors of two; indices may be traced."""
    sublayers, residual, branch = model.parts(observer)
    if swap is not None:
        residual = sublayers.rule.swap(residual, *swap)
        branch = tuple(swap_rows(params, *swap) for params in branch)
    if swap_routing is not None:
        residual = sublayers.rule.swap_routing(residual, *swap_routing)
    params = LayerParams.stacked(residual, branch)
    return Depth(sublayers, params, residual["final"], model.shape.layers)


def walk(
    model: Transformer, depth: Depth, input_ids: jax.Array, layer: Callable
) -> tuple[State, Any]:
    """(the state behind all layers, what was seen [L, ...]) of input_ids [B, T].

    layer: (state, index, params of the layer) -> (state behind it, seen).
    """
    state = depth.rule.begin(model.embedded(input_ids), depth.layers)
    indices = jnp.arange(depth.layers, dtype=jnp.int32)
    return jax.lax.scan(lambda state, inputs: layer(state, *inputs), state, (indices, depth.params))


def at_boundaries(
    model: Transformer, input_ids: jax.Array, look: Callable, skip=NONE
) -> tuple[jax.Array, jax.Array]:
    """(what is seen in front of each layer and at the end [L + 1, ...], features [B, T, D]).

    look: (rule, params, final params, carry, history, s) -> array, with params and s as
    `Residual.depth_state` has them. skip: leave out one layer.
    """
    depth = depth_of(model)

    def layer(state, index, params):
        seen = look(depth.rule, params.residual[KINDS[0]], depth.final, *state, 2 * index)
        return depth.advance(state, index, params, skip), seen

    state, seen = walk(model, depth, input_ids, layer)
    last = look(depth.rule, depth.final, depth.final, *state, None)
    return jnp.concatenate([seen, last[None]]), depth.rule.finish(depth.final, *state)


def depth_states(model: Transformer, input_ids: jax.Array, skip=NONE) -> jax.Array:
    """fp32 [L + 1, B, T, D']: the states z_0 ... z_L whose movement is measured."""

    def look(rule, params, final, carry, history, s):
        return rule.depth_state(params, carry, history, s).astype(jnp.float32)

    return at_boundaries(model, input_ids, look, skip)[0]


def features_of(model: Transformer, depth: Depth, input_ids: jax.Array, skip=NONE) -> jax.Array:
    """What the head reads, [B, T, D]."""

    def layer(state, index, params):
        return depth.advance(state, index, params, skip), None

    return depth.rule.finish(depth.final, *walk(model, depth, input_ids, layer)[0])


def token_losses(logits: jax.Array, input_ids: jax.Array) -> jax.Array:
    """-log p of each token but the first: [B, T - 1] of logits fp32 [B, T, V]."""
    logits = logits[:, :-1]
    picked = jnp.take_along_axis(logits, input_ids[:, 1:, None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def summed_loss(
    model: Transformer, features: jax.Array, input_ids: jax.Array, real: jax.Array
) -> jax.Array:
    """[]: the sum of the losses of all predictions in the rows for which `real` holds."""
    return masked_sum(token_losses(model.logits(features), input_ids), real)


def masked_sum(values: jax.Array, real: jax.Array) -> jax.Array:
    """[...]: the sum of values [b, t, ...] over the tokens of the rows for which `real` holds."""
    return jnp.sum(values * real.reshape(-1, *[1] * (values.ndim - 1)), axis=(0, 1))
