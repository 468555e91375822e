"""What a Pallas kernel for TPU moves between device memory and the chip, counted from its block
specs: a block is fetched, or written back, where its place differs from that of the grid step
before."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.state.discharge import discharge_state  # index maps read scalars from references


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


def kernel_traffic(
    function: Callable, *arguments: Any, scalars: Sequence[Any] = ()
) -> list[KernelTraffic]:
    """Of every kernel that `function` launches, in order.

    arguments: arrays or `jax.ShapeDtypeStruct`s; scalars: the values of the scalars that each
    kernel is given ahead (`num_scalar_prefetch`), the same for all kernels that have any.
    """
    jaxpr = jax.make_jaxpr(function)(*arguments)
    scalars = [np.atleast_1d(np.asarray(value, np.int32)) for value in scalars]
    return [_traffic(call, scalars) for call in _calls(jaxpr.jaxpr)]


def _calls(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
            continue
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _calls(inner)


def _traffic(call: Any, scalars: list[np.ndarray]) -> KernelTraffic:
    mapping, estimate = call.params["grid_mapping"], call.params["cost_estimate"]
    steps, scalars = math.prod(mapping.grid), scalars[: mapping.num_index_operands]
    grid = np.indices(mapping.grid).reshape(len(mapping.grid), steps).astype(np.int32)
    moved, blocks, uncounted = [0, 0], 0, 0
    for place, block in enumerate(mapping.block_mappings):
        if not _is_block(block):
            uncounted += 1
            continue
        sizes, places = _sizes(block), _places(block, grid, scalars)
        shape = np.asarray(block.array_aval.shape).reshape(-1, 1)
        extents = np.clip(shape - places * sizes, 0, sizes)  # the last block may be a part of one
        changes = np.any(places[:, 1:] != places[:, :-1], axis=0)
        itemsize = block.array_aval.dtype.itemsize
        elements = np.prod(extents, axis=0, dtype=np.int64)
        total = itemsize * int(elements[0] + np.sum(elements[1:][changes]))
        moved[place >= len(mapping.block_mappings) - mapping.num_outputs] += total
        blocks += int(itemsize * np.prod(sizes) * (2 if changes.any() else 1))
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


def _places(block: Any, grid: np.ndarray, scalars: list[np.ndarray]) -> np.ndarray:
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
