"""Where arrays lie on a mesh: the one place that says it.

Activations [..., B, T, ...]: a batch is divided over `data` and `fsdp`. Tokens are divided over
`sequence` throughout, and between two branches over `tensor` as well: there stand norms and reads
over depth, which look at one token at a time, and there lie the carry and the history of every
residual connection, whose other axes (streams, sources) are never divided. A branch gathers its
input along `tensor`, divides its heads or columns over it, and its output is summed and scattered
back (Korthikanti et al. 2022, section 4.2). Attention trades tokens for heads along `sequence`
while it looks along the sequence (Jacobs et al. 2023).

Parameters: by the names of their axes. `tensor` divides vocabulary, heads and columns, `fsdp` the
width; where it is used, a matrix is gathered along `fsdp`, and its gradient scattered back. Of the
residual connection's parameters those with two axes and more are divided over `fsdp` along the
longest; norms and queries are whole everywhere.

All of it follows the mesh in force (`jax.set_mesh`), and what does not divide an array leaves it
whole. Without a mesh nothing happens.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from depthjax.kernels.over_mesh import (
    BATCH_AXES,
    FSDP,
    HEAD_AXES,
    SEQUENCE,
    TENSOR,
    TOKEN_AXES,
    dividing,
    free_axes,
)

PARAMETER_AXES = {"vocab": TENSOR, "heads": TENSOR, "columns": TENSOR, "width": FSDP}
"""Name of a parameter's axis -> mesh axis that divides it."""


def parameter_spec(
    axes: Sequence[str | None], shape: Sequence[int], sizes: Mapping[str, int], whole: Any = ()
) -> P:
    """How a parameter is divided over a mesh of `sizes`. axes: names of its last axes; whole: mesh
    axes along which it is gathered."""
    names = [None] * (len(shape) - len(axes)) + [PARAMETER_AXES.get(axis) for axis in axes]

    def divides(name, size):
        return name not in (None, *whole) and sizes.get(name, 1) > 1 and size % sizes[name] == 0

    return P(*(n if divides(n, size) else None for n, size in zip(names, shape, strict=True)))


def residual_axes(shape: Sequence[int]) -> tuple[str | None, ...]:
    """Names of the axes of a residual connection's parameter (of one layer)."""
    if len(shape) < 2:
        return (None,) * len(shape)
    longest = max(range(len(shape)), key=lambda axis: shape[axis])
    return tuple("width" if axis == longest else None for axis in range(len(shape)))


def gather_parameter(x: jax.Array, axes: Sequence[str | None], dtype: Any = None) -> jax.Array:
    """A parameter in `dtype` (None: its own), whole along `fsdp`; its cotangent is divided."""
    x = x if dtype is None else x.astype(dtype)
    sizes = free_axes()
    if sizes.get(FSDP, 1) == 1:
        return x
    divided = parameter_spec(axes, x.shape, sizes)
    return _turn(x, parameter_spec(axes, x.shape, sizes, (FSDP,)), divided)


def spread_tokens(x: jax.Array) -> jax.Array:
    """[B, T, D] as it lies between two branches; its cotangent is gathered for the branch."""
    return _turned(x, TOKEN_AXES, (SEQUENCE,))


def gather_tokens(x: jax.Array) -> jax.Array:
    """[B, T, D] as a branch takes it, its cotangent spread again. Without an axis `tensor`, x
    itself: a copy would be kept for the backward pass."""
    return x if free_axes().get(TENSOR, 1) == 1 else _turned(x, (SEQUENCE,), TOKEN_AXES)


def _turned(x, along, back):
    if math.prod(free_axes().values()) == 1 or x.ndim < 3:
        return x
    batch, length = x.shape[:2]
    rows = dividing(batch, BATCH_AXES) or None
    specs = (P(rows, dividing(length, axes) or None) for axes in (along, back))
    return _turn(x, *specs)


def head_tokens(x: jax.Array) -> jax.Array:
    """[B, T, H, ...] within a branch, its heads divided over `tensor`."""
    return _by_heads(x, (SEQUENCE,), (TENSOR,))


def along_sequence(attend: Callable, *arrays: jax.Array) -> Any:
    """attend(*arrays) of arrays [B, T, H, ...] whose heads have nothing to do with one another: it
    is given, and gives, all tokens of a sequence, and on each device of `sequence` fewer heads."""

    def whole(x):
        return _by_heads(x, (), HEAD_AXES)

    results = attend(*map(whole, arrays))
    # Also whole where they come out, so that the backward pass finds them so.
    return jax.tree.map(lambda x: head_tokens(whole(x)), results)


def gathers() -> bool:
    """Whether branches gather anything on the mesh in force."""
    sizes = free_axes()
    return max(sizes.get(FSDP, 1), sizes.get(TENSOR, 1)) > 1


def not_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
    """A policy of `jax.checkpoint`: all is kept but what was gathered (`gather_parameter`,
    `gather_tokens`), also in another shape."""
    if primitive.name.startswith("custom_vjp_call"):
        return params["call_jaxpr"].jaxpr.debug_info.func_name.split(" ")[0] != _turn.__name__
    return primitive.name not in ("transpose", "reshape")


def _by_heads(x, along, axes):
    if math.prod(free_axes().values()) == 1:
        return x
    batch, length, heads = x.shape[:3]
    ways = dividing(batch, BATCH_AXES), dividing(length, along), dividing(heads, axes)
    return jax.lax.with_sharding_constraint(x, P(*(way or None for way in ways)))


def spread_state(make: Any, embedding: jax.Array) -> Any:
    """The depth state make(embedding [B, T, D]), every array of it divided as the tokens are.

    Arrays of keys and values [..., B, T, K, E] have their heads divided over `tensor`, as the
    attention that makes and reads them.
    """
    state = make(embedding)
    if math.prod(free_axes().values()) == 1 or embedding.ndim != 3:
        return state
    specs = state_specs(make, embedding)
    return jax.tree.map(jax.lax.with_sharding_constraint, state, specs)


def state_specs(make: Any, embedding: jax.Array) -> Any:
    """PartitionSpecs of the depth state make(embedding)."""
    batch, length, width = embedding.shape

    def like(batch, length):
        return jax.eval_shape(make, jax.ShapeDtypeStruct((batch, length, width), embedding.dtype))

    def spec(state, taller, longer):
        """The axis that grows with the batch is the batch's, and so on."""
        names: list[Any] = [None] * len(state.shape)
        for other, axes in ((taller, BATCH_AXES), (longer, TOKEN_AXES)):
            for axis, sizes in enumerate(zip(state.shape, other.shape, strict=True)):
                if sizes[0] != sizes[1]:
                    names[axis] = axes
        if len(names) > 3 and names[-3] == TOKEN_AXES:
            names[-3:] = [(SEQUENCE,), (TENSOR,), None]
        divided = ((n and dividing(s, n)) or None for n, s in zip(names, state.shape, strict=True))
        return P(*divided)

    sizes = (batch, length), (batch + 1, length), (batch, length + 1)
    return jax.tree.map(spec, *(like(*size) for size in sizes))


def look_up(table: jax.Array, ids: jax.Array) -> jax.Array:
    """table[ids] as [B, T, D] that lies as between two branches, from a table [V, D] that lies as
    a parameter of the axes vocab and width: each device looks in its part of the vocabulary."""
    sizes = free_axes()
    if math.prod(sizes.values()) == 1:
        return table[ids]
    spec = parameter_spec(("vocab", "width"), table.shape, sizes)
    rows, along = dividing(len(ids), BATCH_AXES), dividing(ids.shape[1], TOKEN_AXES)
    by_vocab = spec[0] == TENSOR and TENSOR in along
    if spec[0] and not by_vocab:
        spec = P(None, spec[1])
    seen = tuple(axis for axis in along if not (by_vocab and axis == TENSOR))

    def local(table, ids):
        if spec[1]:
            table = jax.lax.all_gather(table, FSDP, axis=1, tiled=True)
        if not by_vocab:
            return table[ids]
        place = ids - jax.lax.axis_index(TENSOR) * len(table)
        mine = (place >= 0) & (place < len(table))
        found = jnp.where(mine[..., None], table[jnp.where(mine, place, 0)], 0)
        return jax.lax.psum_scatter(found, TENSOR, scatter_dimension=1, tiled=True)

    run = jax.shard_map(
        local,
        in_specs=(spec, P(rows or None, seen or None)),
        out_specs=P(rows or None, along or None),
        axis_names=set(sizes),
        check_vma=False,
    )
    return run(table, ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _turn(x: jax.Array, spec: P, back: P) -> jax.Array:
    """x under `spec`, its cotangent under `back`: a constraint alone would hold it under `spec`, by
    a sum over devices that all of them keep."""
    return _placed(x, spec)


_turn.defvjp(
    lambda x, spec, back: (_turn(x, spec, back), None),
    lambda spec, back, _, d: (_placed(d, back),),
)


def _placed(x: jax.Array, spec: P) -> jax.Array:
    # Behind a barrier, or the compiler gathers what x was before it was cast to fewer bits.
    return jax.lax.with_sharding_constraint(jax.lax.optimization_barrier(x), spec)
