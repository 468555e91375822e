"""Phase 1 on a TPU: each source is read once for all queries, and both products with it run on the
matrix unit.

C tokens (a tile) at a time, N sources are one matrix [N C, D], source by source. Its product with
the queries gives logits [S, N C], dense in lanes. The mixtures are A @ sources, where row (s, t) of
A [S C, N C] holds the weights of query s at token t, and zeros at other tokens: the waste of a
factor C is what the matrix unit has left over while memory is read. The backward pass is made of
the same products, transposed.

Products are as exact as fp32: what multiplies bf16 sources is split into bf16 terms beside each
other, three for queries, two for weights while they are for few queries; fp32 sources take the
matrix unit's exact products.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from depthjax.kernels.bf16_terms import bf16_terms
from depthjax.kernels.choice import tpu_interpreter
from depthjax.kernels.two_phase.tiles import LANES, Tiling, block_tokens, sublanes, vector_memory

WIDTH = 1024
"""Entries of D that are multiplied at a time."""
TWO_TERMS = 8
"""Most queries whose weights are split in two: of more, the products would take longer than the
memory (on chips with a matrix unit of 128 x 128). Of one term a weight is off by 2^-9 of itself."""

_NN, _NT, _TN = ((((a,), (b,)), ((), ())) for a, b in ((1, 0), (1, 1), (0, 0)))


def _dot(a, b, dimensions):
    exact = a.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


class _Chunks:
    """What both kernels do with C tokens of a block of sources; `refs` are blocks [rows, block, D]
    of consecutive rows."""

    def __init__(self, refs, queries, tiling, masked, count_ref):
        self.refs, self.queries, self.tiling = refs, queries, tiling
        self.masked, self.count_ref = masked, count_ref
        self.dtype, self.width = refs[0].dtype, refs[0].shape[-1]
        self.rows = sum(ref.shape[0] for ref in refs)
        self.size = sublanes(self.dtype)  # C
        self.number = tiling.block // self.size
        self.keys = self.rows * self.size  # N C
        self.padded = -(-queries // 8) * 8
        ids = [pl.program_id(axis) for axis in range(3)]
        self.start = tiling.step(*ids) * tiling.block  # first token
        self.place = ids[2] * tiling.block  # of which within its block of lanes
        lane = jax.lax.broadcasted_iota(jnp.int32, (self.size, self.keys), 1) % self.size
        self.own = jax.lax.broadcasted_iota(jnp.int32, lane.shape, 0) == lane  # [C, N C]

    def tiles(self):
        return [(lo, min(lo + WIDTH, self.width)) for lo in range(0, self.width, WIDTH)]

    def at(self, chunk):
        return pl.ds(pl.multiple_of(chunk * self.size, self.size), self.size)

    def beyond(self, x, chunk):
        """x [..., C, w] with zeros at tokens behind the last one."""
        if not self.tiling.ragged:
            return x
        token = jax.lax.broadcasted_iota(jnp.int32, (self.size, x.shape[-1]), 0)
        inside = token < self.tiling.tokens - self.start - chunk * self.size
        return jnp.where(inside, x.astype(jnp.float32), 0).astype(x.dtype)

    def sources(self, chunk, lo, hi):
        """[N C, hi - lo], zeros in dead rows."""
        parts = []
        for ref in self.refs:
            block = self.beyond(ref[:, self.at(chunk), lo:hi], chunk)
            for row in block if self.masked else [block]:
                if self.masked:
                    live = len(parts) < self.count_ref[0]
                    row = jax.lax.select(live, row, jnp.zeros_like(row))
                parts.append(row.reshape(-1, hi - lo))
        return jnp.concatenate(parts) if len(parts) > 1 else parts[0]

    def lane_parts(self, x, fill):
        """[S, N C] as pieces of whole lanes, the last one filled up."""
        fill = jnp.full((x.shape[0], -self.keys % LANES), fill, x.dtype)
        x = jnp.concatenate([x, fill], axis=1) if fill.size else x
        return [x[:, lane : lane + LANES] for lane in range(0, x.shape[1], LANES)]

    def over_sources(self, op, parts):
        """[S, 128]: at each lane the reduction over all sources of its token, the lane modulo C."""
        x, shift = functools.reduce(op, parts), self.size
        while shift < LANES:
            x, shift = op(x, pltpu.roll(x, shift, 1)), 2 * shift
        return x

    def whole(self, parts):
        """The inverse of `lane_parts`."""
        x = jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
        return x[:, : self.keys]

    def logits(self, first, second, chunk, eps):
        """(e [S, N C], -inf in dead rows, rho [1, N C], second(tile) @ sources^T).

        first: the ref of the queries' terms; second: a function of (lo, hi) or None."""
        sums, others, squares = 0, 0, jnp.zeros((self.keys, LANES), jnp.float32)
        for lo, hi in self.tiles():
            v = self.sources(chunk, lo, hi)
            left = first[:, lo:hi]
            if second is not None:
                left = jnp.concatenate([second(lo, hi), left])
            sums += _dot(left, v, _NT)
            wide = v.astype(jnp.float32)
            square = wide * wide
            if (hi - lo) % LANES:
                fill = jnp.zeros((self.keys, -(hi - lo) % LANES), jnp.float32)
                square = jnp.concatenate([square, fill], axis=1)
            for lane in range(0, square.shape[1], LANES):
                squares += square[:, lane : lane + LANES]
        if second is not None:
            others, sums = sums[: -first.shape[0]], sums[-first.shape[0] :]
        squares = jnp.sum(squares.T, axis=0, keepdims=True)
        rho = jax.lax.rsqrt(squares * (1 / self.width) + eps)
        terms = sums.shape[0] // self.padded
        e = sum(sums[self.padded * k : self.padded * (k + 1)] for k in range(terms)) * rho
        if self.masked:
            row = jax.lax.broadcasted_iota(jnp.int32, e.shape, 1) // self.size
            e = jnp.where(row < self.count_ref[0], e, -jnp.inf)
        return e, rho, others

    def spread(self, p):
        """[S, N C] -> A [S C, N C] in fp32: row (s, t) holds p_s at token t, else zeros."""
        p = jnp.where(self.own[None], p[: self.queries, None, :], 0.0)
        return p.reshape(self.queries * self.size, self.keys)

    def mine(self, chunk, lanes):
        """Whether lanes of a block of lanes hold tokens of the chunk."""
        lane = jax.lax.broadcasted_iota(jnp.int32, lanes, 1)
        return lane // self.size == self.place // self.size + chunk


def _forward_kernel(count_ref, eps_ref, terms_ref, *refs, tiling, masked):
    *sources, mixtures_ref, lse_ref = refs
    queries = mixtures_ref.shape[0]
    chunks = _Chunks(sources, queries, tiling, masked, count_ref)

    def weigh(chunk):
        """p [S, N C]; writes the log-sum-exp."""
        e, _, _ = chunks.logits(terms_ref, None, chunk, eps_ref[0])
        parts = chunks.lane_parts(e, -jnp.inf)
        most = jnp.maximum(chunks.over_sources(jnp.maximum, parts), jnp.finfo(jnp.float32).min)
        parts = [jnp.exp(part - most) for part in parts]
        total = chunks.over_sources(jnp.add, parts)
        lse = jnp.where(total > 0, most + jnp.log(total), -jnp.inf)[:queries]
        lse = jnp.concatenate([lse] * (tiling.lanes // LANES), axis=1)
        lse_ref[...] = jnp.where(chunks.mine(chunk, lse.shape), lse, lse_ref[...])
        inverse = 1 / jnp.where(total > 0, total, 1)
        return chunks.whole([part * inverse for part in parts])

    def mix(chunk, p):
        a = chunks.spread(p)
        two = chunks.dtype == jnp.bfloat16 and queries <= TWO_TERMS
        parts = bf16_terms(a, 2) if two else [a.astype(chunks.dtype)]
        a = jnp.concatenate(parts, axis=1)
        for lo, hi in chunks.tiles():
            v = chunks.sources(chunk, lo, hi)
            o = _dot(a, jnp.concatenate([v] * len(parts)), _NN).astype(mixtures_ref.dtype)
            mixtures_ref[:, chunks.at(chunk), lo:hi] = o.reshape(queries, chunks.size, hi - lo)

    @pl.when(chunks.start < tiling.tokens)
    def _():
        def step(chunk, p):  # the products of a chunk while the next one is weighed
            mix(chunk - 1, p)
            return weigh(chunk)

        last = jax.lax.fori_loop(1, chunks.number, step, weigh(0))
        mix(chunks.number - 1, last)


def _backward_kernel(count_ref, eps_ref, terms_ref, pull_ref, *refs, tiling, masked, into):
    *sources, by_ref, lse_ref, by_lse_ref, by_blocks_ref, by_directions_ref = refs
    into_ref = sources.pop(0) if into else None
    queries = by_ref.shape[0]
    chunks = _Chunks(sources, queries, tiling, masked, count_ref)
    bf16 = chunks.dtype == jnp.bfloat16
    terms = bf16_terms if bf16 else (lambda x, n: [x])

    def cotangents(chunk, lo, hi):
        by = chunks.beyond(by_ref[:, chunks.at(chunk), lo:hi], chunk)
        return by.reshape(queries * chunks.size, hi - lo)

    def of_tokens(ref, chunk):
        """[S, block of lanes] -> [S, 128]: at each lane the entry of its token, the lane modulo
        C."""
        x = jnp.where(chunks.mine(chunk, ref.shape), ref[...], 0)
        fill = jnp.zeros((chunks.padded - queries, ref.shape[1]), jnp.float32)
        x = jnp.concatenate([x, fill]) if fill.size else x
        parts = [x[:, lane : lane + LANES] for lane in range(0, x.shape[1], LANES)]
        return chunks.over_sources(jnp.add, parts)

    def weigh(chunk):
        """(p, g rho, both [S, N C], and [1, N C] what multiplies the sources)."""
        second = functools.partial(cotangents, chunk)
        e, rho, others = chunks.logits(terms_ref, second, chunk, eps_ref[0])
        others = others.reshape(queries, chunks.size, chunks.keys)
        dots = jnp.sum(jnp.where(chunks.own[None], others, 0.0), axis=1)
        fill = jnp.zeros((chunks.padded - queries, chunks.keys), jnp.float32)
        dots = jnp.concatenate([dots, fill]) if fill.size else dots
        lse, by_lse = of_tokens(lse_ref, chunk), of_tokens(by_lse_ref, chunk)
        e_parts, dots = chunks.lane_parts(e, -jnp.inf), chunks.lane_parts(dots, 0.0)
        p = [jnp.where(e > -jnp.inf, jnp.exp(e - lse), 0.0) for e in e_parts]
        delta = chunks.over_sources(jnp.add, [p * dot for p, dot in zip(p, dots, strict=True)])
        g = [p * (dot - delta + by_lse) for p, dot in zip(p, dots, strict=True)]
        p, g = chunks.whole(p), chunks.whole(g)
        live = jax.lax.broadcasted_iota(jnp.int32, g.shape, 0) < queries
        if tiling.ragged:
            token = jax.lax.broadcasted_iota(jnp.int32, g.shape, 1) % chunks.size
            live &= token < tiling.tokens - chunks.start - chunk * chunks.size
        g = jnp.where(live, g, 0.0)
        radial = jnp.sum(jnp.where(g == 0, 0.0, g * e), axis=0, keepdims=True)
        return p, g * rho, radial * rho * rho * (-1 / chunks.width)

    def pull(chunk, weighed):
        p, g, radial = weighed
        first, *rest = terms(g, 2)
        # Beside the weights, all terms of g^T u but the smallest.
        beside = [first, first, *rest] if bf16 else [first]
        beside = jnp.concatenate([x.astype(jnp.float32) for x in beside]).astype(chunks.dtype)
        a = jnp.concatenate([chunks.spread(p).astype(chunks.dtype), beside])
        sums = jnp.concatenate([x.astype(jnp.float32) for x in (first, *rest)])
        sums = sums.astype(chunks.dtype)
        column = jnp.concatenate(chunks.lane_parts(jnp.broadcast_to(radial, (8, chunks.keys)), 0.0))
        column = jnp.concatenate(
            [column[8 * k : 8 * k + 8].T[:, :1] for k in range(column.shape[0] // 8)]
        )[: chunks.keys]
        for lo, hi in chunks.tiles():
            v = chunks.sources(chunk, lo, hi)
            right = jnp.concatenate([cotangents(chunk, lo, hi), pull_ref[:, lo:hi]])
            by = _dot(a, right, _TN) + column * v.astype(jnp.float32)
            by = by.reshape(chunks.rows, chunks.size, hi - lo)
            if into:
                by += into_ref[:, chunks.at(chunk), lo:hi].astype(jnp.float32)
            by_blocks_ref[:, chunks.at(chunk), lo:hi] = by.astype(by_blocks_ref.dtype)
            by = _dot(sums, v, _NN)
            by = sum(by[k : k + chunks.padded] for k in range(0, by.shape[0], chunks.padded))
            by_directions_ref[0, :, lo:hi] += by

    @pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))
    def _():
        by_directions_ref[...] = jnp.zeros_like(by_directions_ref)

    @pl.when(chunks.start < tiling.tokens)
    def _():
        def step(chunk, weighed):
            pull(chunk - 1, weighed)
            return weigh(chunk)

        last = jax.lax.fori_loop(1, chunks.number, step, weigh(0))
        pull(chunks.number - 1, last)


def _row_groups(rows: int) -> int:
    """Rows of one operand, where dead rows are not to be fetched: at most 16 operands."""
    return next(size for size in range(1, rows + 1) if rows % size == 0 and rows // size <= 16)


def _operands(blocks, tiling, count):
    """(operands, their BlockSpecs) of the sources. Under a count, rows are operands by themselves:
    a dead one stays at its first block, which is fetched once."""
    rows, _, width = blocks.shape
    if count is None:

        def whole(*ids):
            return 0, tiling.token_block(*ids[:3]), 0

        return [blocks], [pl.BlockSpec((rows, tiling.block, width), whole)]
    size = _row_groups(rows)

    def spec(index):
        def place(*ids):
            live = index * size < ids[3][0]
            return index, jnp.where(live, tiling.token_block(*ids[:3]), 0), 0

        return pl.BlockSpec((size, tiling.block, width), place)

    return [blocks] * (rows // size), [spec(index) for index in range(rows // size)]


def _along(rows, tiling, width):
    """[rows, T, width], a block of tokens a step."""
    place = lambda *ids: (0, tiling.token_block(*ids[:3]), 0)  # noqa: E731
    return pl.BlockSpec((rows, tiling.block, width), place)


def _on_lanes(rows, tiling):
    """[rows, T], a block of lanes a group."""
    return pl.BlockSpec((rows, tiling.lanes), lambda *ids: (0, tiling.group(*ids[:2])))


def _constant(x):
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)


def _padded_terms(directions, dtype, beside=False):
    """[terms S', D], S' a multiple of 8: the directions' terms; beside: in the order in which the
    backward pass multiplies them, of which the middle one comes with the first of g."""
    rows = jnp.pad(directions.astype(jnp.float32), [(0, -len(directions) % 8), (0, 0)])
    if dtype == jnp.float32:
        return rows
    first, middle, last = bf16_terms(rows)
    return jnp.concatenate([first, middle, first] if beside else [first, middle, last])


def _tiling(blocks, queries, rows=0):
    block = block_tokens(blocks, queries, rows)
    return Tiling.of(blocks.shape[1], block, sublanes(blocks.dtype))


def _scalars(blocks, count, eps):
    rows = len(blocks)
    count = rows if count is None else jnp.clip(count, 0, rows)
    return jnp.asarray(count, jnp.int32).reshape(1), jnp.asarray(eps, jnp.float32).reshape(1)


def _moved(blocks, count, *others):
    """Bytes that a launch reads of sources, the mean over counts, and of all else."""
    live = len(blocks) if count is None else (len(blocks) + 1) / 2
    sources = live * blocks[0].size * blocks.dtype.itemsize
    return int(sources + sum(x.size * x.dtype.itemsize for x in others))


def _call(kernel, name, tiling, scalars, in_specs, out_specs, out_shape, cost, **options):
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=tiling.grid,
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), *in_specs],
        out_specs=out_specs,
    )
    call = pl.pallas_call(
        kernel,
        grid_spec=grid,
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vector_memory()[0],
        ),
        cost_estimate=cost,
        interpret=tpu_interpreter(),
        name=name,
        **options,
    )
    return functools.partial(call, *scalars)


def forward(blocks, directions, count, eps):
    """(mixtures [S, T, D], lse [S, T]) of blocks [N, T, D] and directions [S, D]; see `phase1`."""
    (rows, tokens, width), queries = blocks.shape, len(directions)
    tiling = _tiling(blocks, queries)
    operands, specs = _operands(blocks, tiling, count)
    terms = _padded_terms(directions, blocks.dtype)
    out_shape = (
        jax.ShapeDtypeStruct((queries, tokens, width), blocks.dtype),
        jax.ShapeDtypeStruct((queries, tokens), jnp.float32),
    )
    cost = pl.CostEstimate(
        flops=4 * rows * queries * tokens * width,
        transcendentals=rows * queries * tokens,
        bytes_accessed=_moved(blocks, count, terms, *out_shape),
    )
    return _call(
        functools.partial(_forward_kernel, tiling=tiling, masked=count is not None),
        "two_phase_1",
        tiling,
        _scalars(blocks, count, eps),
        [_constant(terms), *specs],
        (_along(queries, tiling, width), _on_lanes(queries, tiling)),
        out_shape,
        cost,
    )(terms, *operands)


def backward(blocks, by_mixtures, into, lse, by_lse, directions, count, eps):
    """(cotangent [N, T, D], that of the directions [S, D] in fp32); see `phase1_backward`."""
    (rows, tokens, width), queries = blocks.shape, len(directions)
    tiling = _tiling(blocks, queries, rows if into is None else 2 * rows)
    operands, specs = _operands(blocks, tiling, count)
    terms = _padded_terms(directions, blocks.dtype)
    beside = _padded_terms(directions, blocks.dtype, beside=True)
    added = [] if into is None else [into]
    along = _along(rows, tiling, width)
    padded = queries + -queries % 8
    parts = tiling.grid[0]
    out_shape = (
        jax.ShapeDtypeStruct(blocks.shape, blocks.dtype if into is None else into.dtype),
        jax.ShapeDtypeStruct((parts, padded, width), jnp.float32),
    )
    others = terms, beside, *added, by_mixtures, lse, by_lse, *out_shape
    cost = pl.CostEstimate(
        flops=10 * rows * queries * tokens * width,
        transcendentals=rows * queries * tokens,
        bytes_accessed=_moved(blocks, count, *others),
    )
    kernel = functools.partial(
        _backward_kernel, tiling=tiling, masked=count is not None, into=into is not None
    )
    small = _on_lanes(queries, tiling)
    by_blocks, by_directions = _call(
        kernel,
        "two_phase_1_backward",
        tiling,
        _scalars(blocks, count, eps),
        [
            *(_constant(terms), _constant(beside)),
            *([along] * len(added)),
            *specs,
            *(_along(queries, tiling, width), small, small),
        ],
        (along, pl.BlockSpec((1, padded, width), lambda *ids: (ids[0], 0, 0))),
        out_shape,
        cost,
        # The simulation of a TPU cannot alias an array that it pads.
        input_output_aliases={4: 0} if added and not tiling.ragged else {},
    )(terms, beside, *added, *operands, by_mixtures, lse, by_lse)
    return by_blocks, jnp.sum(by_directions, axis=0)[:queries]
