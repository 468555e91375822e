"""Depth as one scan with a backward pass of its own.

The history holds all that the reads of a stack need, and its rows never change. So the backward
pass is given the final history once and the carry in front of each layer (or sublayer, or group of
layers), and computes everything else again. It goes through the layers in reverse with two
cotangents, that of the carry and that of the history: a read adds to the rows that it saw, and an
appended row finds its cotangent in its place. Plain differentiation of the scan would keep a
history for every layer instead.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from depthjax.models.keep import Remat, full, recompute, thin
from depthjax.models.phases import scan_by_phases
from depthjax.models.sublayers import LayerParams, Sublayers, differentiable, vjp
from depthjax.residuals import ATTENTION, MLP, append
from depthjax.residuals.base import State


class _Kept(NamedTuple):
    """What the forward pass leaves of one sublayer for the backward pass."""

    carry: Any
    """In front of the sublayer."""
    pullbacks: tuple | None = None
    """Of its branch and of its write, and the place of the row that it appends."""


def scan_layers(
    sublayers: Sublayers, params: LayerParams, state: State, first: jax.Array | int, remat: Remat
) -> tuple[State, Any]:
    """Takes the depth state through a stack of layers by one scan.

    params: [L, ...]; first: index of the first of these layers in the whole network, may be traced.
    Returns the state behind them, and what was observed, [2 L, ...] (no gradient comes from it).
    Differentiable in reverse mode. The cotangent of the history that comes in is right in the rows
    that are live there; the others hold anything.
    """
    layers = jax.tree.leaves(params)[0].shape[0]
    group = min(remat.group, layers) if remat.policy == "group" else 1
    whole = layers - layers % group
    pieces, seen = [(0, whole, group), (whole, layers, layers - whole)], []
    for start, end, size in (piece for piece in pieces if piece[1] > piece[0]):
        part = params if end - start == layers else jax.tree.map(lambda p: p[start:end], params)  # noqa: B023
        run = _differentiable_scan(sublayers, dataclasses.replace(remat, group=size))
        state, observed = run(part, state, jnp.asarray(first + start, jnp.int32))
        seen.append(observed)
    return state, jax.tree.map(lambda *parts: jnp.concatenate(parts), *seen)


def _differentiable_scan(sublayers: Sublayers, remat: Remat):
    """(params [L, ...], state, first) -> (state, observed), where `remat.group` divides L.

    Two loops, over groups and over the layers of one. Both go by index: passed from one to the
    other, the parameters of a group and their gradients would exist twice.
    """
    regroups = remat.policy == "group"

    def forward(params, state, first, keep):
        def group(state, indices):
            start = _Kept(state[0]), None
            state, (kept, seen) = jax.lax.scan(layer, state, indices)
            return state, (start if keep and regroups else kept, seen)

        def layer(state, i):
            state, kept, seen = _forward(sublayers, remat, _at(params, i), state, first + i)
            return state, (kept if keep and not regroups else None, seen)

        state, (kept, seen) = jax.lax.scan(group, state, _indices(params, remat))
        return (state, jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), seen)), kept

    @jax.custom_vjp
    def run(params, state, first):
        phases = sublayers.phases()
        if phases is not None:
            return scan_by_phases(sublayers, phases, params, state, first), None
        return forward(params, state, first, keep=False)[0]

    def run_forward(params, state, first):
        (state, seen), kept = forward(params, state, first, keep=True)
        return (state, seen), (params, state[1], first, kept)

    def run_backward(residuals, cotangents):
        params, history, first, kept = residuals

        def layer(carry, inputs):
            d_params, d_state = carry
            i, kept = inputs
            pulls = _pulls(sublayers, remat, _at(params, i), kept, history, first + i)
            for kind in (MLP, ATTENTION):
                d_own, d_state = pulls[kind](d_state)
                d_params, d_state = d_params.stored(kind, i, d_own, d_state)
            return (d_params, d_state), None

        def group(carry, inputs):
            indices, kept = inputs
            if regroups:
                kept = _rebuild(sublayers, params, kept[0].carry, history, first, indices)
            return jax.lax.scan(layer, carry, (indices, kept), reverse=True)

        zeros = jax.tree.map(jnp.zeros_like, differentiable(params))
        carry, inputs = (zeros, differentiable(cotangents[0])), (_indices(params, remat), kept)
        (d_params, d_state), _ = jax.lax.scan(group, carry, inputs, reverse=True)
        return d_params, d_state, None

    run.defvjp(run_forward, run_backward)
    return run


def _indices(params: LayerParams, remat: Remat) -> jax.Array:
    """0..L-1 as [L / g, g]."""
    layers = jax.tree.leaves(params)[0].shape[0]
    return jnp.arange(layers, dtype=jnp.int32).reshape(-1, remat.group)


def _at(params: LayerParams, i) -> LayerParams:
    """The parameters of the i-th of these layers."""
    return jax.tree.map(lambda p: jax.lax.dynamic_index_in_dim(p, i, 0, keepdims=False), params)


def _forward(sublayers: Sublayers, remat: Remat, params: LayerParams, state: State, index):
    """(state, kept, observed) of one layer; kept: a _Kept a sublayer, None for what is rebuilt."""
    kept, seen = [], []
    for kind in (ATTENTION, MLP):
        s = 2 * index + kind
        seen.append(sublayers.observe(kind, params, *state, s))
        before = state[0]
        if remat.keeps_branches:
            carry, appended, _, pullbacks = _sublayer(sublayers, remat, kind, params, state, s)
            kept.append(_Kept(before, pullbacks))
            history = state[1]
            if appended is not None:
                # It is put in place once the history is read, or that would be copied.
                carry, history = jax.lax.optimization_barrier((carry, history))
            state = carry, append(history, appended)
        else:
            state, _ = sublayers.sublayer(kind, params, state, s)
            kept.append(_Kept(before) if kind == ATTENTION or remat.policy == "sublayer" else None)
    return state, tuple(kept), jax.tree.map(lambda *both: jnp.stack(both), *seen)


def _rebuild(sublayers: Sublayers, params: LayerParams, carry, history, first, indices):
    """What policy "layer" keeps of a group of layers, from the carry in front of it."""

    def layer(carry, i):
        kept, own = (_Kept(carry), None), _at(params, i)
        for kind in (ATTENTION, MLP):
            s = 2 * (first + i) + kind
            x, ctx, carry, _ = sublayers.read(kind, own, carry, history, s)
            y, aux = sublayers.branch(kind, own, x, ctx)
            carry, _ = sublayers.write(kind, own, carry, y, aux, s)
        return carry, kept

    return jax.lax.scan(layer, carry, indices)[1]


def _pulls(sublayers, remat, params, kept, history, index):
    """Of the two sublayers of a layer: d_state -> (d_params of its own, d_state)."""
    pulls, carry = [], None
    for kind in (ATTENTION, MLP):
        s, saved = 2 * index + kind, kept[kind]
        before = carry if saved is None else saved.carry
        pullbacks = None if saved is None else saved.pullbacks
        carry, _, pull, _ = _sublayer(
            sublayers, remat, kind, params, (before, history), s, pullbacks
        )
        pulls.append(pull)
    return pulls


def _sublayer(sublayers, remat, kind, params, state, s, kept=None):
    """(carry, appended, pull, kept) of one sublayer. kept: the pullbacks of branch and write and
    the place of the appended row, without what a read recomputes; given, the branch is not run and
    there is neither carry nor appended. pull: d_state -> (d_params of its own, d_state)."""
    params = params.of(kind)

    def read(params, carry, history):
        return sublayers.read(kind, params, carry, history, s)

    def branch(params, x, ctx):
        return sublayers.branch(kind, params, x, ctx)

    def write(params, carry, y, aux):
        return sublayers.write(kind, params, carry, y, aux, s)

    (x, ctx, mid, _), pull_read = vjp(read, params, *state)
    ready = differentiable((params, x, ctx, mid))
    if kept is None:
        (y, aux), pull_branch = vjp(recompute(branch, remat), params, x, ctx)
        (carry, appended), pull_write = vjp(write, params, mid, y, aux)
        place = None if appended is None else appended[1:]
        kept = thin((pull_branch, pull_write), ready), place
    else:
        (pull_branch, pull_write), place = full(kept[0], ready), kept[1]
        carry = appended = None

    def pull(d_state):
        d_carry, d_history = d_state
        d_appended = None if place is None else (_row(d_history, *place), None, None)
        d_params, d_mid, d_y, d_aux = pull_write((d_carry, d_appended))
        more, d_x, d_ctx = pull_branch((d_y, d_aux))
        d_params = jax.tree.map(jnp.add, d_params, more)
        if place is not None:
            # What takes the appended row's cotangent out comes before the read that adds to that of
            # the history in place, or it would be copied.
            d_mid, d_history = jax.lax.optimization_barrier((d_mid, d_history))
        more, *d_state = pull_read((d_x, d_ctx, d_mid, d_history))
        return jax.tree.map(jnp.add, d_params, more), tuple(d_state)

    return carry, appended, pull, kept


def _row(history, slot, flag):
    """The row at `slot` of every buffer; zeros where the flag is not set."""

    def row(buffer):
        found = jax.lax.dynamic_index_in_dim(buffer, slot, 0, keepdims=False)
        return jnp.where(flag, found, jnp.zeros_like(found))

    return jax.tree.map(row, history)
