"""The first phase of Attention Residuals on a GPU: many queries mix the same finished blocks.

    e_si = u_s . v_i rho_i,  rho_i = 1 / sqrt(mean(v_i^2) + eps),  p_s = softmax_i(e_s)
    z_s  = sum_i p_si v_i

(arXiv 2603.15031, section 4, in the normalised form). All queries are scored against a row at once:
[S, D] numbers lie in registers with the queries in each thread and the features across them, so
that one exchange between the threads ends all S products. Where the queries and their mixtures fit,
the softmax runs online, and a row is read once. Else the features are divided: a pass for the
products of each part, and one for the mixtures.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from depthjax.kernels.mosaic_gpu import warpgroup as wg
from depthjax.kernels.mosaic_gpu.mixture import LEAST, mix

PIECE = 128
"""Features of a copy: no copy takes more than 256 along an axis."""
IN_REGISTERS = 8192
"""Numbers of queries, and of mixtures, that a warpgroup holds: 64 registers a thread for each."""


def phase_one(rows, count, directions, eps, *, dtype=None, interpret=None):
    """(mixtures [S, T, D] in `dtype`, the rows' by default, lse [S, T] fp32) of the first `count`,
    at least one, of rows [N, T, D] under directions [S, D], each a query times its key scale.

    Moves (count + S) T D numbers where S D is at most 8192, else (2 count + S) T D.
    """
    queries, width = directions.shape
    dtype = jnp.dtype(dtype or rows.dtype)
    if queries == 1:
        mixture, lse = mix(rows, count, None, directions[0], eps, dtype=dtype, interpret=interpret)
        return mixture[None], lse[None]
    directions = directions.astype(jnp.float32)
    if queries * width <= IN_REGISTERS:
        return _online(rows, count, directions, eps, dtype, interpret)
    part = _part(queries, width)
    if part is None:  # too many queries even for the narrowest part
        half = queries // 2
        parts = directions[:half], directions[half:]
        results = [phase_one(rows, count, x, eps, dtype=dtype, interpret=interpret) for x in parts]
        return tuple(jnp.concatenate(x) for x in zip(*results, strict=True))
    products, squares = _products(rows, count, directions, part, interpret)
    live = jnp.arange(rows.shape[0]) < count
    rho = lax.rsqrt(jnp.sum(squares, axis=0) / width + eps)
    e = jnp.where(live[:, None], jnp.sum(products, axis=0) * rho[..., None], -jnp.inf)
    lse = jax.nn.logsumexp(e, axis=1)
    p = jnp.exp(e - lse[:, None])
    return _weigh(rows, count, p, part, dtype, interpret), lse.T


def _part(queries: int, width: int) -> int | None:
    """Features of a part: a divisor of the width by the piece."""
    pieces = width // PIECE
    fitting = [n for n in range(1, pieces + 1) if pieces % n == 0]
    fitting = [n * PIECE for n in fitting if n * PIECE * queries <= IN_REGISTERS]
    return max(fitting, default=None)


def _mean_rows(rows) -> float:
    """The mean over the counts."""
    return (rows.shape[0] + 1) / 2


def _layout(queries: int, features: int) -> Any:
    """Of [S, features]: `neighbours` features a thread, all S queries in it."""
    near = math.gcd(features // wg.LANES, 4)
    tiles = tuple((queries, n * near) for n in (wg.LANES, wg.LANES // 4, 1))
    return plgpu.Layout.TILED(Tiling(tiles), warp_dims=(-5,), lane_dims=(-3,), vector_dim=-1)


class _Queries:
    """Arithmetic on [S, features] in registers."""

    def __init__(self, queries: int, features: int):
        self.shape, self.layout = (queries, features), _layout(queries, features)

    def load(self, ref):
        return wg.load(ref, self.layout)

    def row(self, ref):
        """([features] in shared memory, as fp32 beside every query; the sum of their squares)."""
        row = wg.load(ref, self.layout.reduce(0))
        return self._spread(row, 1), jnp.sum(row * row)

    def each(self, x):
        """[S] beside every feature."""
        return self._spread(x, 0)

    def _spread(self, x, axis):
        return plgpu.layout_cast(lax.broadcast_in_dim(x, self.shape, (axis,)), self.layout)

    def full(self, value):
        return plgpu.layout_cast(jnp.full(self.shape, value, jnp.float32), self.layout)

    def full_of_queries(self, value):
        full = jnp.full(self.shape[:1], value, jnp.float32)
        return plgpu.layout_cast(full, self.layout.reduce(1))


def _ring(rows, count, block, blocks, part: int, buffer, arrived) -> wg.Ring:
    """Steps: the live rows of a block's tokens, one token after another. A block takes one part of
    the features, block % parts, and every (blocks / parts)-th token."""
    parts = rows.shape[-1] // part
    start = lax.rem(block, parts) * part

    def copy(step, slot):
        n, token = lax.rem(step, count), lax.div(step, count) * (blocks // parts)
        row = rows.at[n, lax.div(block, parts) + token]
        for at in range(0, part, PIECE):
            plgpu.copy_gmem_to_smem(
                row.at[pl.ds(start + at, PIECE)],
                buffer.at[slot, pl.ds(at, PIECE)],
                arrived.at[slot],
            )

    return wg.Ring(arrived, buffer.shape[0], copy)


def _plan(rows, part: int, live: int) -> tuple[int, dict]:
    """(blocks, shared memory) of a kernel over parts of rows, where `live` numbers for each of the
    features are in registers."""
    _, tokens, width = rows.shape
    parts = width // part
    slots = wg.slots_of(part * rows.dtype.itemsize)
    scratch = {
        "buffer": plgpu.SMEM((slots, part), rows.dtype),
        "arrived": plgpu.Barrier(num_arrivals=part // PIECE, num_barriers=slots),
    }
    of_part = wg.blocks_of(tokens, slots * part * rows.dtype.itemsize, live, part)
    return max(1, of_part // parts) * parts, scratch


def _online(rows, count, directions, eps, dtype, interpret):
    queries, width = directions.shape
    tokens = rows.shape[1]
    blocks, scratch = _plan(rows, width, 2 * queries + 2)
    live = _mean_rows(rows)
    moved = [(live, rows.dtype), (queries, dtype)]
    of = _Queries(queries, width)

    def body(block, count_ref, rows_ref, u_ref, mixture_ref, lse_ref, *, buffer, arrived):
        count, mine = count_ref[0], wg.tokens_of(block, blocks, tokens)
        ring = _ring(rows_ref, count, block, blocks, width, buffer, arrived)
        ring.fill(mine * count)
        u = of.load(u_ref)

        @pl.loop(0, mine)
        def _(k):
            def step(n, state):
                most, weight, z = state
                slot = ring.wait(k * count + n)
                v, square = of.row(buffer.at[slot])
                e = jnp.sum(u * v, axis=1) * lax.rsqrt(square / width + eps)
                above = jnp.maximum(most, e)
                keep, p = jnp.exp(most - above), jnp.exp(e - above)
                ring.release(k * count + n, mine * count)
                return above, weight * keep + p, z * of.each(keep) + of.each(p) * v

            start = of.full_of_queries(LEAST), of.full_of_queries(0), of.full(0)
            most, weight, z = lax.fori_loop(0, count, step, start)
            token = block + k * blocks
            wg.store(most + jnp.log(weight), lse_ref.at[token])
            wg.store(z / of.each(weight), mixture_ref.at[:, token])

    kernel = wg.launch(
        body,
        ("depth_phase_one", wg.cost(tokens, width, moved, 4 * queries * live)),
        blocks,
        (
            jax.ShapeDtypeStruct((queries, tokens, width), dtype),
            jax.ShapeDtypeStruct((tokens, queries), jnp.float32),
        ),
        scratch,
        interpret,
    )
    mixtures, lse = kernel(wg.scalar(count), rows, directions)
    return mixtures, lse.T


def _products(rows, count, directions, part, interpret):
    """(u_s . v_i [parts, T, N, S], |v_i|^2 [parts, T, N]) over each part of the features; those of
    dead rows hold anything."""
    queries, width = directions.shape
    sources, tokens, _ = rows.shape
    parts = width // part
    blocks, scratch = _plan(rows, part, 2 * queries + 2)
    live = _mean_rows(rows)
    of = _Queries(queries, part)

    def body(block, count_ref, rows_ref, u_ref, products_ref, squares_ref, *, buffer, arrived):
        i, lane = lax.rem(block, parts), lax.div(block, parts)
        count, mine = count_ref[0], wg.tokens_of(lane, blocks // parts, tokens)
        ring = _ring(rows_ref, count, block, blocks, part, buffer, arrived)
        ring.fill(mine * count)
        u = of.load(u_ref.at[:, pl.ds(i * part, part)])

        @pl.loop(0, mine * count)
        def _(step):
            slot = ring.wait(step)
            n, token = lax.rem(step, count), lane + lax.div(step, count) * (blocks // parts)
            v, squares_ref[i, token, n] = of.row(buffer.at[slot])
            wg.store(jnp.sum(u * v, axis=1), products_ref.at[i, token, n])
            ring.release(step, mine * count)

    shape = parts, tokens, sources
    kernel = wg.launch(
        body,
        ("depth_products", wg.cost(tokens, width, [(live, rows.dtype)], 2 * queries * live)),
        blocks,
        (
            jax.ShapeDtypeStruct((*shape, queries), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        scratch,
        interpret,
    )
    return kernel(wg.scalar(count), rows, directions)


def _weigh(rows, count, weights, part, dtype, interpret):
    """sum_i p_si v_i [S, T, D] with weights p [T, N, S]."""
    queries, (_, tokens, width) = weights.shape[-1], rows.shape
    parts = width // part
    blocks, scratch = _plan(rows, part, queries + 2)
    live = _mean_rows(rows)
    of = _Queries(queries, part)

    def body(block, count_ref, rows_ref, weights_ref, mixture_ref, *, buffer, arrived):
        i, lane = lax.rem(block, parts), lax.div(block, parts)
        count, mine = count_ref[0], wg.tokens_of(lane, blocks // parts, tokens)
        ring = _ring(rows_ref, count, block, blocks, part, buffer, arrived)
        ring.fill(mine * count)

        @pl.loop(0, mine)
        def _(k):
            token = lane + k * (blocks // parts)

            def step(n, z):
                p = of.each(wg.load(weights_ref.at[token, n], of.layout.reduce(1)))
                z = z + p * of.row(buffer.at[ring.wait(k * count + n)])[0]
                ring.release(k * count + n, mine * count)
                return z

            z = lax.fori_loop(0, count, step, of.full(0))
            wg.store(z, mixture_ref.at[:, token, pl.ds(i * part, part)])

    out_type = jax.ShapeDtypeStruct((queries, tokens, width), dtype)
    moved = [(live, rows.dtype), (queries, dtype)]
    call = "depth_weigh", wg.cost(tokens, width, moved, 2 * queries * live)
    kernel = wg.launch(body, call, blocks, out_type, scratch, interpret)
    return kernel(wg.scalar(count), rows, weights)
