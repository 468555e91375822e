"""How a warpgroup works on many queries at once, and on a part of the features.

[S, features] numbers lie in registers with the queries in each thread and the features across the
threads, so that sums over features take one exchange for all queries, and sums over queries none.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from depthjax.kernels.mosaic_gpu import warpgroup as wg

IN_REGISTERS = 8192
"""Numbers of queries, and of mixtures, that a warpgroup holds: 64 registers a thread for each."""


def part_of(queries: int, width: int, arrays: int = 1) -> int | None:
    """Features of a part, of which `arrays` [S, part] fit: a divisor of the width; None if there is
    none."""
    pieces = width // wg.LANES
    fitting = [n * wg.LANES for n in range(1, pieces + 1) if pieces % n == 0]
    return max((n for n in fitting if n * queries * arrays <= IN_REGISTERS), default=None)


def mean_rows(rows) -> float:
    """The mean over the counts."""
    return (rows.shape[0] + 1) / 2


def _layout(queries: int, features: int) -> Any:
    """Of [S, features]: `neighbours` features a thread, all S queries in it."""
    near = math.gcd(features // wg.LANES, 4)
    tiles = tuple((queries, n * near) for n in (wg.LANES, wg.LANES // 4, 1))
    return plgpu.Layout.TILED(Tiling(tiles), warp_dims=(-5,), lane_dims=(-3,), vector_dim=-1)


class Queries:
    """Arithmetic on [S, features] in registers."""

    def __init__(self, queries: int, features: int):
        self.shape, self.layout = (queries, features), _layout(queries, features)
        self.of_queries, self.of_features = self.layout.reduce(1), self.layout.reduce(0)

    def load(self, ref):
        return wg.load(ref, self.layout)

    def row(self, ref):
        """([features] in shared memory, as fp32 beside every query; the sum of their squares)."""
        row = wg.load(ref, self.of_features)
        return self.beside(row), jnp.sum(row * row)

    def beside(self, row):
        """[features] beside every query."""
        return self._spread(row, 1)

    def each(self, x):
        """[S] beside every feature."""
        return self._spread(x, 0)

    def _spread(self, x, axis):
        return plgpu.layout_cast(lax.broadcast_in_dim(x, self.shape, (axis,)), self.layout)

    def full(self, value):
        return plgpu.layout_cast(jnp.full(self.shape, value, jnp.float32), self.layout)

    def full_of_queries(self, value):
        full = jnp.full(self.shape[:1], value, jnp.float32)
        return plgpu.layout_cast(full, self.of_queries)

    def full_of_features(self, value):
        full = jnp.full(self.shape[1:], value, jnp.float32)
        return plgpu.layout_cast(full, self.of_features)


class Divided:
    """How a kernel's blocks divide tokens and features: block b takes part b % parts and, of the
    tokens, b // parts and every lanes-th one after it.

    rows: [..., T, D]; shared_bytes, live: of a block, see `warpgroup.blocks_of`.
    """

    def __init__(self, rows, part: int, shared_bytes: int, live: int):
        *_, self.tokens, width = rows.shape
        self.part, self.parts = part, width // part
        blocks = wg.blocks_of(self.tokens * self.parts, shared_bytes, live, part)
        self.lanes = min(self.tokens, max(1, blocks // self.parts))
        self.blocks = self.lanes * self.parts

    def of(self, block):
        """(part, its slice, lane, tokens of the lane)."""
        i, lane = lax.rem(block, self.parts), lax.div(block, self.parts)
        features = pl.ds(i * self.part, self.part)
        return i, features, lane, wg.tokens_of(lane, self.lanes, self.tokens)


class Parts(Divided):
    """The same, with a ring for a part of each of the arrays [N, T, D]."""

    def __init__(self, arrays, part: int, live: int):
        a_step = part * sum(x.dtype.itemsize for x in arrays)
        self.slots = wg.slots_of(a_step)
        super().__init__(arrays[0], part, self.slots * a_step, live)
        self.scratch = {
            "buffers": [plgpu.SMEM((self.slots, part), x.dtype) for x in arrays],
            "arrived": plgpu.Barrier(
                num_arrivals=len(arrays) * copies_of(part), num_barriers=self.slots
            ),
        }

    def ring(self, arrays, block, count, buffers, arrived) -> wg.Ring:
        """Steps: the live rows of one token after another, in each of the arrays."""
        i, _, lane, _ = self.of(block)

        def copy(step, slot):
            n, token = lax.rem(step, count), lane + lax.div(step, count) * self.lanes
            for array, buffer in zip(arrays, buffers, strict=True):
                row = array.at[n, token]
                copy_part(row, i * self.part, buffer.at[slot], arrived.at[slot])

        return wg.Ring(arrived, self.slots, copy)


def copy_part(row, start, slot, barrier) -> None:
    """Starts the copies of a part of a row from feature `start`: `copies_of` it, as none takes more
    than 256 along an axis."""
    (part,) = slot.shape
    piece = part // copies_of(part)
    for at in range(0, part, piece):
        plgpu.copy_gmem_to_smem(
            row.at[pl.ds(start + at, piece)], slot.at[pl.ds(at, piece)], barrier
        )


def copies_of(part: int) -> int:
    return part // (256 if part % 256 == 0 else wg.LANES)
