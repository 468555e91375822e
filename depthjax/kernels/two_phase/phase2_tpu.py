"""Phase 2 on a TPU, one launch: what a branch returns becomes the new open sum, and that and the
mixture of phase 1 become the next sublayer's normalised input.

R tokens at a time, on sublanes, so that a token's statistics are sums along lanes; the log-sum-exp,
tokens on lanes, is turned with a mask.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from depthjax.kernels.choice import tpu_interpreter
from depthjax.kernels.two_phase.tiles import LANES, Tiling, row_tokens, vector_memory

ROWS = 16
"""R: one tile of bf16, two of fp32."""
MOST_ENTRIES = 8192
"""Entries of a token, times chunks, that are scheduled together."""


def _at(chunk):
    return pl.ds(pl.multiple_of(chunk * ROWS, ROWS), ROWS)


def _lanes(place):
    """The 128 lanes of a [1, lanes] block among which are those of a chunk, and [R, 128] whether a
    lane is the token of the row; place: the lane of the first."""
    first = pl.multiple_of(place // LANES * LANES, LANES)
    lane = jax.lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 1)
    own = lane == jax.lax.broadcasted_iota(jnp.int32, lane.shape, 0) + (place - first)
    return pl.ds(first, LANES), own


def _column(ref, place):
    """[1, lanes] -> [R, 1]"""
    lanes, own = _lanes(place)
    return jnp.sum(jnp.where(own, ref[:, lanes], 0.0), axis=1, keepdims=True)


def _set_row(ref, place, column):
    """The inverse."""
    lanes, own = _lanes(place)
    row = jnp.sum(jnp.where(own, column, 0.0), axis=0, keepdims=True)
    ours = jnp.max(own.astype(jnp.int32), axis=0, keepdims=True) > 0
    ref[:, lanes] = jnp.where(ours, row, ref[:, lanes])


def _mean(x):
    return jnp.sum(x, axis=1, keepdims=True) * (1 / x.shape[1])


def _read(o, p, direction_ref, lse, scalars_ref):
    """(rho, e, w, h, r), all but h [R, D] of shape [R, 1]; r: the inverse norm of h."""
    rho = jax.lax.rsqrt(_mean(p * p) + scalars_ref[0])
    e = jnp.sum(p * direction_ref[...], axis=1, keepdims=True) * rho
    w = jax.nn.sigmoid(e - lse)
    h = o + w * (p - o)
    return rho, e, w, h, jax.lax.rsqrt(_mean(h * h) + scalars_ref[1])


def _over_chunks(tiling, width, body):
    """body(rows of the blocks, lane of the first of them, mask) for all R tokens of a block; mask:
    zeros in x [R, w] what lies behind the last token."""
    ids = [pl.program_id(axis) for axis in range(3)]
    start = tiling.step(*ids) * tiling.block

    def step(chunk, _):
        first = pl.multiple_of(chunk * ROWS, ROWS)

        def mask(x):
            if not tiling.ragged:
                return x
            token = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
            return jnp.where(token < tiling.tokens - start - first, x, 0.0)

        body(pl.ds(first, ROWS), ids[2] * tiling.block + first, mask)

    @pl.when(start < tiling.tokens)
    def _():
        chunks = tiling.block // ROWS
        together = min(max(MOST_ENTRIES // width, 1), 4, chunks)
        jax.lax.fori_loop(0, chunks, step, None, unroll=together)


def _forward_kernel(fresh_ref, _, scalars_ref, *refs, tiling, may_be_fresh):
    direction_ref, scale_ref, lse_ref, mixture_ref, open_ref, *branch_ref, x_ref, p_ref = refs

    def body(rows, place, _):
        p = open_ref[rows, :]
        if branch_ref:
            branch = branch_ref[0][rows, :].astype(jnp.float32)
            total = p.astype(jnp.float32) + branch
            p = jnp.where(fresh_ref[0] > 0, branch, total) if may_be_fresh else total
            p = p.astype(p_ref.dtype)
        p_ref[rows, :] = p
        o, p = mixture_ref[rows, :].astype(jnp.float32), p.astype(jnp.float32)
        *_, h, r = _read(o, p, direction_ref, _column(lse_ref, place), scalars_ref)
        x_ref[rows, :] = (h * r * scale_ref[...]).astype(x_ref.dtype)

    _over_chunks(tiling, x_ref.shape[1], body)


def _backward_kernel(scalars_ref, direction_ref, scale_ref, lse_ref, *refs, tiling):
    o_ref, p_ref, by_x_ref, by_p_ref, by_o_ref, by_sum_ref, by_lse_ref, *sums_refs = refs

    def body(rows, place, mask):
        load = lambda ref: mask(ref[rows, :].astype(jnp.float32))  # noqa: E731
        o, p, by_x = load(o_ref), load(p_ref), load(by_x_ref)
        lse = _column(lse_ref, place)
        rho, e, w, h, r = _read(o, p, direction_ref, lse, scalars_ref)
        h = h * r
        c = by_x * scale_ref[...]
        by_h = r * (c - h * _mean(c * h))
        by_e = jnp.sum(by_h * (p - o), axis=1, keepdims=True) * w * (1 - w)
        by_o_ref[rows, :] = ((1 - w) * by_h).astype(by_o_ref.dtype)
        pull = mask(by_e * rho)
        radial = pull * (rho * e * (1 / p.shape[1]))
        by_p = load(by_p_ref) + w * by_h + pull * direction_ref[...] - radial * p
        by_sum_ref[rows, :] = by_p.astype(by_sum_ref.dtype)
        _set_row(by_lse_ref, place, -by_e)
        for ref, x in zip(sums_refs, (pull * p, mask(by_x * h)), strict=True):
            ref[0] += jnp.sum(x.reshape(ROWS // 8, 8, -1), axis=0)

    @pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))
    def _():
        for ref in sums_refs:
            ref[...] = jnp.zeros_like(ref)

    _over_chunks(tiling, o_ref.shape[1], body)


def _tokens(tiling, width):
    return pl.BlockSpec((tiling.block, width), lambda *ids: (tiling.token_block(*ids[:3]), 0))


def _tiling(arrays):
    tokens, width = arrays[0].shape
    block = row_tokens(width, sum(x.dtype.itemsize for x in arrays))
    return Tiling.of(tokens, block, ROWS)


def _small(tiling, direction, norm_scale, scalars, lse):
    """(operands, BlockSpecs) of all that is not [T, D]."""
    scalars = jnp.stack([jnp.asarray(x, jnp.float32) for x in scalars])
    rows = [x.astype(jnp.float32)[None] for x in (direction, norm_scale)]
    row = pl.BlockSpec(rows[0].shape, lambda *_: (0, 0))
    lanes = pl.BlockSpec((1, tiling.lanes), lambda *ids: (0, tiling.group(*ids[:2])))
    specs = [pl.BlockSpec(memory_space=pltpu.SMEM), row, row, lanes]
    return [scalars, *rows, lse[None]], specs


def _call(kernel, name, **options):
    return pl.pallas_call(
        kernel,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vector_memory()[0],
        ),
        interpret=tpu_interpreter(),
        name=name,
        **options,
    )


def _cost(operands, results, factor):
    """factor: operations per entry of the first result."""
    moved = sum(x.size * x.dtype.itemsize for x in (*operands, *results))
    flops, roots = factor * results[0].size, 3 * results[0].shape[0]
    return pl.CostEstimate(flops=flops, transcendentals=roots, bytes_accessed=moved)


def forward(mixtures, place, open_sum, branch, lse, direction, norm_scale, fresh, scalars):
    """(x, p), both [T, D], of row `place` of mixtures [S, T, D], open_sum, branch (or None) [T, D]
    and lse [T]; see `phase2`."""
    tokens = [x for x in (open_sum, branch) if x is not None]
    mixture, p = (jax.ShapeDtypeStruct(open_sum.shape, x.dtype) for x in (mixtures, open_sum))
    out_shape = mixture, p
    tiling = _tiling([mixture, *tokens, *out_shape])
    small, specs = _small(tiling, direction, norm_scale, scalars, lse)
    block = _tokens(tiling, mixture.shape[1])

    def placed(*ids):
        return ids[4][0], tiling.token_block(*ids[:3]), 0

    def stale(*ids):  # an open sum that is replaced stays at its first block
        return jnp.where(ids[3][0] > 0, 0, tiling.token_block(*ids[:3])), 0

    open_block = block if fresh is None else pl.BlockSpec(block.block_shape, stale)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=tiling.grid,
        in_specs=[
            *specs,
            pl.BlockSpec((None, *block.block_shape), placed),
            open_block,
            *[block] * (len(tokens) - 1),
        ],
        out_specs=(block, block),
    )
    cost = _cost([*small, mixture, *tokens], out_shape, 12)
    call = _call(
        functools.partial(_forward_kernel, tiling=tiling, may_be_fresh=fresh is not None),
        "two_phase_2",
        grid_spec=grid,
        out_shape=out_shape,
        cost_estimate=cost,
    )
    fresh, place = (
        jnp.asarray(0 if x is None else x, jnp.int32).reshape(1) for x in (fresh, place)
    )
    return call(fresh, place, *small, mixtures, *tokens)


def backward(mixture, p, by_x, by_p, lse, direction, norm_scale, scalars):
    """Cotangents of (mixture [T, D], p [T, D], lse [T], direction [D], norm scale [D]), given those
    of x and p."""
    arrays, width = (mixture, p, by_x, by_p), mixture.shape[1]
    by_tokens = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (mixture, p)]
    tiling = _tiling([*arrays, *by_tokens])
    small, specs = _small(tiling, direction, norm_scale, scalars, lse)
    block = _tokens(tiling, width)
    sums = jax.ShapeDtypeStruct((tiling.grid[0], 8, width), jnp.float32)
    out_shape = (*by_tokens, jax.ShapeDtypeStruct((1, len(lse)), jnp.float32), sums, sums)
    part = pl.BlockSpec((1, 8, width), lambda *ids: (ids[0], 0, 0))
    call = _call(
        functools.partial(_backward_kernel, tiling=tiling),
        "two_phase_2_backward",
        grid=tiling.grid,
        in_specs=[*specs, *[block] * 4],
        out_specs=(block, block, specs[-1], part, part),
        out_shape=out_shape,
        cost_estimate=_cost([*small, *arrays], out_shape, 30),
    )
    by_mixture, by_p, by_lse, *sums = call(*small, *arrays)
    return by_mixture, by_p, by_lse[0], *(jnp.sum(x, axis=(0, 1)) for x in sums)
