"""Depth as one scan in two phases, for variants that can (see `residuals.base.Phases`)."""

from typing import Any

import jax
import jax.numpy as jnp

from depthjax.models.sublayers import LayerParams, Sublayers
from depthjax.residuals import ATTENTION, KINDS, MLP, append
from depthjax.residuals.base import Phases, State


def scan_by_phases(
    sublayers: Sublayers, phases: Phases, params: LayerParams, state: State, first: Any
) -> State:
    """The state behind a stack of layers: as `scan_layers`, for a forward pass alone.

    A backward pass would hold the answers of a group three times: those that it reads again, those
    of the group before, and their cotangents.
    """
    layers = jax.tree.leaves(params)[0].shape[0]
    # The first reader may stand within a group, the last one too.
    around = [(phases.size, phases.size), (0, 0)]
    directions = jnp.pad(phases.directions(params.residual), around)

    def step(kind, own, i, state, y, answers):
        carry, history = state
        s, begun = 2 * (first + i) + kind, (i > 0) | (kind == MLP)
        carry, appended = phases.close(carry, s, begun)
        appended = appended if sublayers.rule.appends(1 - kind) else None  # it is of s - 1
        history, place = append(history, appended), phases.place(s)
        start = 2 * i + kind - place + phases.size
        group = jax.lax.dynamic_slice_in_dim(directions, start, phases.size)
        answers = jax.lax.cond(
            begun & (place > 0),
            lambda *_: answers,
            lambda *arguments: phases.answer(*arguments),
            *(carry, history, group),
        )
        x, carry = phases.seam(own.residual[KINDS[kind]], carry, y, answers, s, begun)
        return (carry, history), sublayers.branch(kind, own, x, None)[0], answers

    def layer(loop, inputs):
        i, own = inputs
        for kind in (ATTENTION, MLP):
            loop = step(kind, own, i, *loop)
        return loop, None

    carry, history = state
    nothing = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype),
        jax.eval_shape(phases.answer, carry, history, directions[: phases.size]),
    )
    loop = state, jnp.zeros_like(sublayers.rule.stream(carry)), nothing
    inputs = jnp.arange(layers, dtype=jnp.int32), params
    ((carry, history), y, _), _ = jax.lax.scan(layer, loop, inputs)
    last = jax.tree.map(lambda leaf: leaf[-1], params)
    carry, appended = sublayers.write(MLP, last, carry, y, None, 2 * (first + layers) - 1)
    return carry, append(history, appended)
