"""What a Pallas kernel for TPU moves between device memory and the chip, counted from its block
specs: a block is fetched, or written back, where its place differs from that of the grid step
before."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.state.discharge import discharge_state  # index maps read scalars from references
from jax.interpreters.partial_eval import dce_jaxpr


@dataclasses.dataclass(frozen=True)
class KernelTraffic:
    """Bytes of one launch. stated: what its `pl.CostEstimate` says, None without one. blocks: what
    its blocks take on the chip, two of each where they change. operands: arrays that the kernel
    moves by itself, which are not counted."""

    name: str
    steps: int
    reads: int
    writes: int
    stated: int | None
    blocks: int
    uncounted: int

    @property
    def moved(self) -> int:
        return self.reads + self.writes


def kernel_traffic(function: Callable, *arguments: Any) -> list[KernelTraffic]:
    """Of every kernel that `function` launches, in order.

    arguments: arrays or `jax.ShapeDtypeStruct`s. Numbers that decide what a kernel fetches (scalars
    that it is given ahead, bounds of its grid) must follow from constants of the function.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    used, needed = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))  # as compilers do
    found: list[KernelTraffic] = []
    nowhere = jax.sharding.AbstractMesh((), ())  # not on the devices of a mesh that is compiled for
    with jax.sharding.use_abstract_mesh(nowhere):
        _walk(used, closed.consts, [None] * sum(needed), found)
    return found


def _walk(jaxpr: Any, consts: Sequence[Any], known: Sequence[Any], found: list) -> list[Any]:
    """The results that are known from the arguments that are (None: unknown); adds to `found`."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *known], strict=True))

    def read(atom):
        return atom.val if hasattr(atom, "val") else values.get(atom)

    for equation in jaxpr.eqns:
        given, results = [read(atom) for atom in equation.invars], None
        if equation.primitive.name == "pallas_call":
            found.append(_traffic(equation, given))
            continue
        inner = [_open(value) for value in jax.tree.leaves(list(equation.params.values()))]
        inner = [each for each in inner if each is not None]
        for body, own in inner:
            fits = len(inner) == 1 and len(body.invars) == len(given)
            results = _walk(body, own, given if fits else [None] * len(body.invars), found)
        if not inner and all(value is not None for value in given):
            results = equation.primitive.bind(*given, **equation.params)
            results = results if equation.primitive.multiple_results else [results]
        if results is not None and len(results) == len(equation.outvars):
            values |= zip(equation.outvars, results, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _open(value: Any) -> tuple[Any, Sequence[Any]] | None:
    """(jaxpr, constants) of a jaxpr, closed or not."""
    if hasattr(value, "eqns"):
        return value, getattr(value, "consts", ())
    return (value.jaxpr, value.consts) if hasattr(value, "jaxpr") else None


def _traffic(call: Any, given: Sequence[Any]) -> KernelTraffic:
    mapping, estimate = call.params["grid_mapping"], call.params["cost_estimate"]
    bounds = iter(given[: mapping.num_dynamic_grid_bounds])
    sizes = [size if isinstance(size, int) else int(next(bounds)) for size in mapping.grid]
    first, count = mapping.num_dynamic_grid_bounds, mapping.num_index_operands
    scalars, steps = given[first : first + count], math.prod(sizes)
    grid = np.indices(sizes).reshape(len(sizes), steps).astype(np.int32)
    moved, blocks, uncounted = [0, 0], 0, 0
    for place, block in enumerate(mapping.block_mappings):
        if not _is_block(block):
            uncounted += 1
            continue
        shape, places = _sizes(block), _places(block, grid, scalars)
        whole = np.asarray(block.array_aval.shape).reshape(-1, 1)
        extents = np.clip(whole - places * shape, 0, shape)  # the last block may be a part of one
        changes = np.any(places[:, 1:] != places[:, :-1], axis=0)
        itemsize = block.array_aval.dtype.itemsize
        elements = np.prod(extents, axis=0, dtype=np.int64)
        total = itemsize * int(elements[0] + np.sum(elements[1:][changes]))
        moved[place >= len(mapping.block_mappings) - mapping.num_outputs] += total
        blocks += int(itemsize * np.prod(shape) * (2 if changes.any() else 1))
    stated = None if estimate is None else int(estimate.bytes_accessed)
    return KernelTraffic(str(call.params["name"]), steps, *moved, stated, blocks, uncounted)


def _is_block(block: Any) -> bool:
    """Whether the array comes in blocks, and not as a reference into device memory or scalars."""
    space = getattr(block.transformed_block_aval, "memory_space", None)
    return str(space).lower() not in ("any", "hbm", "smem")


def _sizes(block: Any) -> np.ndarray:
    """[axes, 1]"""
    sizes = [
        getattr(size, "block_size", 1 if not isinstance(size, int) else size)
        for size in block.block_shape
    ]
    return np.asarray(sizes, np.int64).reshape(-1, 1)


def _places(block: Any, grid: np.ndarray, scalars: Sequence[Any]) -> np.ndarray:
    """[axes, steps]: indices of the block at each step of the grid [axes of the grid, steps]."""
    closed = block.index_map_jaxpr
    pure = discharge_state(closed)
    results = len(closed.jaxpr.outvars)

    def places(*indices):
        return jax.core.eval_jaxpr(pure.jaxpr, pure.consts, *indices, *map(jnp.asarray, scalars))[
            :results
        ]

    found = jax.vmap(places)(*jnp.asarray(grid)) if grid.size else places()
    return np.stack([np.broadcast_to(axis, grid.shape[1]) for axis in found]).astype(np.int64)
