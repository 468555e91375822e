"""Many rounds of the same step on a few numbers of each token, on a GPU: one launch each way.

A thread has a token, and its numbers in registers. The step is taken apart: an array [..., T] is so
many vectors over the tokens of a block, and what it does along leading axes is done by name. XLA
would launch a few kernels a round, of which each reads and writes all numbers.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.interpreters.partial_eval import dce_jaxpr

from depthjax.kernels.mosaic_gpu import LANES
from depthjax.kernels.mosaic_gpu import warpgroup as wg

_ELEMENTWISE = {
    "add": lambda a, b: a + b,
    "add_any": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "exp": jnp.exp,
    "log": jnp.log,
    "stop_gradient": lambda a: a,
}
_REDUCTIONS = {"reduce_sum": lambda a, b: a + b, "reduce_max": jnp.maximum}
_SHAPES = ("broadcast_in_dim", "reshape", "squeeze")
_KNOWN = {*_ELEMENTWISE, *_REDUCTIONS, *_SHAPES, "integer_pow"}


def repeat(step: Callable[[Any], Any], state: Any, times: int) -> Any:
    """The state after `times` steps, see `streams.spelling.repeat`.

    state: fp32 arrays [..., T], with T a multiple of 128 that no other axis has. step: one that
    `takes` is true of.
    """
    if not times:
        return state  # a kernel has no array of no rounds
    converted, consts = jax.closure_convert(step, state)
    return _repeat(converted, times, state, consts)


def takes(step: Callable[[Any], Any], state: Any) -> bool:
    """Whether a step, and its pullback, go element by element or along leading axes, by moves that
    are known here; beside the state it may read arrays [..., T] and numbers."""
    both = jax.make_jaxpr(lambda state: jax.vjp(step, state)[1](state))(state)
    tokens = jax.tree.leaves(state)[0].shape[-1]
    consts = all(x.ndim == 0 or x.shape[-1] == tokens for x in map(jnp.asarray, both.consts))
    return consts and {eqn.primitive.name for eqn in both.jaxpr.eqns} <= _KNOWN


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _repeat(step, times, state, consts):
    leaves, tree = jax.tree.flatten(state)
    tokens = leaves[0].shape[-1]
    one = _Step(lambda state, consts: step(state, *consts), tokens, state, consts)
    packed, constant = _pack(leaves, tokens), _pack(consts, tokens)

    def body(block, state_ref, *refs):
        at = pl.ds(block * LANES, LANES)
        *const_ref, out_ref = refs
        consts = _load(const_ref[0], at) if const_ref else []
        start = tuple(_load(state_ref, at))
        end = lax.fori_loop(0, times, lambda _, state: tuple(one(state, consts)), start)
        _store(end, out_ref, at)

    operands = [packed] if constant is None else [packed, constant]
    out = _launch(body, "rounds", tokens, [packed.shape], operands)[0]
    return _unpack(out, leaves, tree)


def _forward(step, times, state, consts):
    return _repeat(step, times, state, consts), (state, consts)


def _backward(step, times, kept, cotangents):
    """Runs forward once more, with the state in front of each round put aside."""
    state, consts = kept
    leaves, tree = jax.tree.flatten(state)
    tokens = leaves[0].shape[-1]
    one = _Step(lambda state, consts: step(state, *consts), tokens, state, consts)
    back = _Step(
        lambda state, consts, by: jax.vjp(lambda s, c: step(s, *c), state, consts)[1](by),
        tokens, state, consts, state,
    )  # fmt: skip
    packed, constant = _pack(leaves, tokens), _pack(consts, tokens)
    numbers = len(packed)

    def body(block, state_ref, by_ref, *refs):
        at = pl.ds(block * LANES, LANES)
        const_ref, (kept_ref, *out_refs) = refs[: len(consts) > 0], refs[len(consts) > 0 :]
        consts_ = _load(const_ref[0], at) if const_ref else []

        def put(k, state):
            _store(state, kept_ref.at[k], at)
            return tuple(one(state, consts_))

        lax.fori_loop(0, times, put, tuple(_load(state_ref, at)))

        def pull(n, by):
            found = back(_load(kept_ref.at[times - 1 - n], at), consts_, by[:numbers])
            sums = [a + b for a, b in zip(by[numbers:], found[numbers:], strict=True)]
            return (*found[:numbers], *sums)

        start = _load(by_ref, at), [_vector(0)] * (0 if constant is None else len(constant))
        found = lax.fori_loop(0, times, pull, (*start[0], *start[1]))
        _store(found[:numbers], out_refs[0], at)
        if const_ref:
            _store(found[numbers:], out_refs[1], at)

    operands = [packed, _pack(jax.tree.leaves(cotangents), tokens)]
    shapes = [(times, *packed.shape), packed.shape]
    if constant is not None:
        operands.append(constant)
        shapes.append(constant.shape)
    _, by_state, *by_consts = _launch(body, "rounds_backward", tokens, shapes, operands)
    return _unpack(by_state, leaves, tree), _unpack_consts(by_consts, consts)


_repeat.defvjp(_forward, _backward)
_LAYOUT = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)


def _launch(body, name, tokens, shapes, operands):
    moved = sum(math.prod(x.shape) for x in operands) + sum(map(math.prod, shapes))
    estimate = pl.CostEstimate(flops=0, bytes_accessed=4 * moved, transcendentals=0)
    out_type = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    return wg.launch(body, (name, estimate), tokens // LANES, out_type, {})(*operands)


def _vector(value):
    return plgpu.layout_cast(jnp.full((LANES,), value, jnp.float32), _LAYOUT)


def _load(ref, at):
    return [wg.load(ref.at[i, at], _LAYOUT) for i in range(ref.shape[0])]


def _store(values, ref, at):
    for i, value in enumerate(values):
        wg.store(value, ref.at[i, at])


def _pack(leaves, tokens):
    """Arrays [..., T] and numbers as [n, T]; None of none."""
    rows = [jnp.broadcast_to(x, (*x.shape[:-1], tokens)).reshape(-1, tokens) for x in leaves]
    return jnp.concatenate(rows).astype(jnp.float32) if rows else None


def _unpack(packed, leaves, tree):
    """The inverse, for arrays like the leaves of a tree."""
    ends = np.cumsum([math.prod(x.shape[:-1]) for x in leaves])[:-1]
    parts = [p.reshape(x.shape) for p, x in zip(jnp.split(packed, ends), leaves, strict=True)]
    return jax.tree.unflatten(tree, parts)


def _unpack_consts(found, consts):
    """The inverse for arrays and numbers; found: [packed], or nothing for none."""
    if not found:
        return consts
    ends = np.cumsum([math.prod(x.shape[:-1]) for x in consts])[:-1]
    parts = zip(jnp.split(found[0], ends), consts, strict=True)
    return [p.reshape(x.shape) if x.ndim else jnp.sum(p) for p, x in parts]


class _Step:
    """A function of arrays [..., T] and numbers, called with vectors over a block's tokens."""

    def __init__(self, function, tokens, *arguments):
        closed = jax.make_jaxpr(lambda *a: jax.tree.leaves(function(*a)))(*arguments)
        wanted = [True] * len(closed.jaxpr.outvars)
        self.jaxpr, _ = dce_jaxpr(closed.jaxpr, wanted, instantiate=True)
        self.consts, self.tokens = closed.consts, tokens

    def __call__(self, *groups):
        vectors, values = iter([v for group in groups for v in group]), {}
        for var in self.jaxpr.invars:
            values[var] = _filled(self._lead(var), lambda: next(vectors))
        found = _evaluate(self.jaxpr, self.consts, values, self._lead)
        return [v if jnp.ndim(v) else _vector(v) for each in found for v in each.flat]

    def _lead(self, var):
        shape = var.aval.shape
        return shape[:-1] if shape and shape[-1] == self.tokens else shape


def _filled(shape, make):
    """An array of whatever `make` gives."""
    out = np.empty(shape, object)
    for index in np.ndindex(*shape):
        out[index] = make()
    return out


def _evaluate(jaxpr, consts, values, lead):
    """The results of a jaxpr, each an array of vectors, from the values of its arguments."""
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        values[var] = _filled((), lambda const=const: float(const))

    def read(atom):
        if hasattr(atom, "val"):
            return _filled((), lambda: float(atom.val))
        return values[atom]

    for eqn in jaxpr.eqns:
        name, given, (out,) = eqn.primitive.name, [read(x) for x in eqn.invars], eqn.outvars
        if name in _ELEMENTWISE:
            found = _each(_ELEMENTWISE[name], *given)
        elif name == "integer_pow":
            found = _each(functools.partial(_power, eqn.params["y"]), *given)
        elif name in _REDUCTIONS:
            found = given[0]  # a number's cotangent is summed over tokens behind the kernel
            axes = [axis for axis in eqn.params["axes"] if axis < found.ndim]
            for axis in sorted(axes, reverse=True):
                parts = [x.squeeze(axis) for x in np.split(found, found.shape[axis], axis)]
                found = functools.reduce(functools.partial(_each, _REDUCTIONS[name]), parts)
        elif name == "broadcast_in_dim":
            places = eqn.params["broadcast_dimensions"][: given[0].ndim]
            shape = [1] * len(lead(out))
            for place, size in zip(places, given[0].shape, strict=True):
                shape[place] = size
            found = np.broadcast_to(given[0].reshape(shape), lead(out))
        else:
            assert name in _SHAPES, name
            found = given[0].reshape(lead(out))
        values[out] = found
    return [read(x) for x in jaxpr.outvars]


def _power(exponent, x):
    product = functools.reduce(lambda a, b: a * b, [x] * abs(exponent))
    return product if exponent > 0 else 1 / product


def _each(function, *arrays):
    """function of all entries, broadcast."""
    arrays = np.broadcast_arrays(*arrays, subok=False)
    out = np.empty(arrays[0].shape, object)
    for index in np.ndindex(*out.shape):
        out[index] = function(*(x[index] for x in arrays))
    return out
