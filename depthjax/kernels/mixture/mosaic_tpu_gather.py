"""One source's cotangent from all its readers on TPU: each stored cotangent is read once.

Grid (parts, token blocks of a part, groups of readers); see `gather` for the equations. The first
step of a token block scores its source against all readers at once, on the matrix unit; each step
takes a few readers' cotangents c_j into sum_j a_j c_j and keeps c_j . v; the last one turns these
into the rest. What belongs to (token, reader) lies in VMEM with readers on lanes. Each part, one a
TensorCore, sums du over its tokens in an output block of its own.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from depthjax.kernels.bf16_terms import bf16_terms
from depthjax.kernels.choice import tpu_interpreter
from depthjax.kernels.mixture import tiles
from depthjax.kernels.mixture.mosaic_tpu import groups, mean_count
from depthjax.kernels.mixture.tiles import FLOAT32, LANES, lane_tiles, over_chunks, sum_lanes, wide


def gather(
    rows: jax.Array,
    index: jax.Array | int,
    last: jax.Array,
    directions: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    eps: jax.Array | float,
    dtype: jax.typing.DTypeLike = FLOAT32,
) -> tuple[jax.Array, jax.Array]:
    """(dv [T, D] of `dtype`, du fp32 [N, D]) of source `index`, as `gather_rows`: rows [N, T, D],
    last [T, D], directions fp32 [N, D], lse and delta fp32 [N, T]."""
    n, tokens, width = rows.shape
    lanes = pl.cdiv(n, LANES) * LANES
    group, block = _sizes(rows, lanes, jnp.dtype(dtype).itemsize)
    blocks, padded = pl.cdiv(tokens, block), pl.cdiv(tokens, block) * block
    parts = 2 if blocks % 2 == 0 else 1
    per_part = blocks // parts
    count = n - 1 - index
    directions = jnp.pad(directions.astype(FLOAT32), [(0, lanes - n), (0, 0)])
    lse, delta = (jnp.pad(x, [(0, 0), (0, padded - tokens)]) for x in (lse, delta))

    by_token = pl.BlockSpec((block, width), lambda p, i, r, bounds: (p * per_part + i, 0))
    by_reader = pl.BlockSpec((n, block), lambda p, i, r, bounds: (0, p * per_part + i))
    whole = pl.BlockSpec((lanes, width), lambda p, i, r, bounds: (0, 0))
    part_sum = pl.BlockSpec((None, lanes, width), lambda p, i, r, bounds: (p, 0, 0))
    source = pl.BlockSpec(
        (None, block, width), lambda p, i, r, bounds: (bounds[0] - 1, p * per_part + i, 0)
    )
    given = [
        (pl.BlockSpec(memory_space=pltpu.SMEM), jnp.asarray(eps, FLOAT32).reshape(1)),
        *((whole, directions), (by_reader, lse), (by_reader, delta)),
        *((source, rows), (by_token, last)),
    ]
    for k in range(group):
        member = tiles.grouped_row(k, group, per_part)
        given.append((pl.BlockSpec((None, block, width), member), rows))
    by_pair = pltpu.VMEM((block, lanes), FLOAT32)
    dv, du = pl.pallas_call(
        functools.partial(_kernel, n, tokens if tokens % block else None, group),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(parts, per_part, groups(count, group)),
            in_specs=[spec for spec, _ in given],
            out_specs=[by_token, part_sum],
            scratch_shapes=[
                *(by_pair, by_pair, by_pair, pltpu.VMEM((lanes, block), FLOAT32)),
                *(pltpu.VMEM((block, 1), FLOAT32), pltpu.VMEM((block, width), FLOAT32)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((tokens, width), dtype),
            jax.ShapeDtypeStruct((parts, lanes, width), FLOAT32),
        ],
        compiler_params=tiles.compiler_params("parallel", "arbitrary", "arbitrary"),
        cost_estimate=_cost(rows, count, dtype, lanes, parts),
        interpret=tpu_interpreter(),
        name="depth_gather",
    )(tiles.scalars(index + 1, count), *(array for _, array in given))
    return dv, jnp.sum(du, axis=0)[:n]


def _sizes(rows, lanes, result) -> tuple[int, int]:
    """(readers of a group, tokens of a block)."""
    n, tokens, width = rows.shape
    size = rows.dtype.itemsize
    other = width * (4 + 4 * size + 2 * result) + 4 * (4 * lanes + 2 * 2 * n + LANES)
    for group in tiles.GROUPS:
        row = 2 * group * width * size
        block = tiles.token_block(tokens, other + row, _resident(n, width))
        if block >= min(tokens, LANES):
            break
    return group, block


def fits(rows: jax.Array) -> bool:
    """Whether what belongs to all readers of rows [N, ..., D] leaves most of VMEM for tokens."""
    return 2 * _resident(rows.shape[0], rows.shape[-1]) <= tiles.room()


def _resident(n: int, width: int) -> int:
    """Bytes of the directions and of both buffers of du."""
    return 3 * 4 * pl.cdiv(n, LANES) * LANES * width


def _cost(rows, count, dtype, lanes, parts):
    (n, tokens, width), size = rows.shape, rows.dtype.itemsize
    stored = mean_count(n, count) - (0 if isinstance(count, int) else 1)  # 0..N-1 of them
    by_token = width * (size * (stored + 2) + jnp.dtype(dtype).itemsize) + 8 * n
    return pl.CostEstimate(
        flops=int(tokens * width * (6 * lanes + 4 * (stored + 1) + 8)),
        transcendentals=tokens * (lanes + 1),
        bytes_accessed=int(tokens * by_token + 4 * lanes * width * (1 + parts)),
    )


def _kernel(readers, tokens, group, bounds, eps_ref, u_ref, lse_ref, delta_ref, v_ref, *refs):
    last_ref, *refs = refs
    cotangents, refs = refs[:group], refs[group:]
    dv_ref, du_ref, e_ref, a_ref, dots_ref, turned_ref, rho_ref, sum_ref = refs
    step, (block, width), index = pl.program_id(2), sum_ref.shape, bounds[0] - 1
    first = (pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)) * block

    @pl.when((step == 0) & (pl.program_id(1) == 0))
    def _():
        du_ref[...] = jnp.zeros_like(du_ref)
        turned_ref[...] = jnp.zeros_like(turned_ref)

    def weigh(at):
        """Scores 128 tokens against all readers."""
        squares, e = [], 0
        for lanes in lane_tiles(width):
            v = v_ref[at, lanes]
            squares.append(v.astype(FLOAT32) ** 2)
            e += _product(v, u_ref[:, lanes], ((1,), (1,)))
        rho = jax.lax.rsqrt(sum_lanes(squares) / width + eps_ref[0])
        rho_ref[at], e = rho, e * rho
        reader = jax.lax.broadcasted_iota(jnp.int32, e.shape, 1)
        reads = (reader >= index) & (reader < readers)
        shifted = jnp.where(reads, e - turned_ref[:, at].T, 0)
        e_ref[at], a_ref[at] = e, jnp.where(reads, jnp.exp(shifted), 0)

    def take(members, at):
        """Adds some readers' cotangents: (reader, ref) pairs."""
        total = [_column(a_ref, at, reader) for reader, _ in members]
        products = [[] for _ in members]
        for lanes in lane_tiles(width):
            v, dv = wide(v_ref, at, lanes), sum_ref[at, lanes]
            for k, (_, ref) in enumerate(members):
                c = wide(ref, at, lanes)
                dv += total[k] * c
                products[k].append(c * v)
            sum_ref[at, lanes] = dv
        dots = dots_ref[at]
        lane = jax.lax.broadcasted_iota(jnp.int32, dots.shape, 1)
        for (reader, _), parts in zip(members, products, strict=True):
            dots = jnp.where(lane == reader, sum_lanes(parts), dots)
        dots_ref[at] = dots

    @pl.when(step == 0)
    def _():
        turned_ref[:readers] = lse_ref[...]
        _over_parts(block, weigh)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        dots_ref[...] = jnp.zeros_like(dots_ref)
        over_chunks(block, functools.partial(take, [(readers - 1, last_ref)]))

    live = bounds[1] - step * group
    for size in range(1, group + 1):
        members = [(index + step * group + k, cotangents[k]) for k in range(size)]

        @pl.when(live >= size if size == group else live == size)
        def _(members=members):
            over_chunks(block, functools.partial(take, members))

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        turned_ref[:readers] = delta_ref[...]

        def finish(at):
            rho, e = rho_ref[at], e_ref[at]
            g = a_ref[at] * (dots_ref[at] - turned_ref[:, at].T)
            radial = rho * rho * jnp.sum(g * e, axis=-1, keepdims=True) / width
            weights = g * rho
            if tokens is not None:
                real = first + at.start + jax.lax.broadcasted_iota(jnp.int32, g.shape, 0) < tokens
                weights = jnp.where(real, weights, 0)
            turned = weights.T
            for lanes in lane_tiles(width):
                v = v_ref[at, lanes]
                along = _product(g, u_ref[:, lanes], ((1,), (0,)))
                dv = sum_ref[at, lanes] + rho * along - radial * v.astype(FLOAT32)
                dv_ref[at, lanes] = dv.astype(dv_ref.dtype)
                if tokens is not None:
                    v = jnp.where(real[:, :1], v, 0)
                du_ref[:, lanes] += _product(turned, v, ((1,), (0,)))

        _over_parts(block, finish)


def _over_parts(block: int, body) -> None:
    """Calls body(slice) for each 128 tokens of a block, what the matrix unit takes at a time. Where
    the last are fewer the slices are static: lanes may start anywhere only at a known place."""
    if block % LANES:
        for start in range(0, block, LANES):
            body(pl.ds(start, min(LANES, block - start)))
        return

    def run(i, _):
        body(pl.ds(pl.multiple_of(i * LANES, LANES), LANES))

    jax.lax.fori_loop(0, block // LANES, run, None)


def _column(ref, at, lane) -> jax.Array:
    """[tokens, 1]: one lane, which may be traced, of a piece."""
    x = ref[at]
    here = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) == lane
    return jnp.sum(jnp.where(here, x, 0), axis=-1, keepdims=True)


def _product(a: jax.Array, b: jax.Array, contract) -> jax.Array:
    """a b in fp32, as exact as fp32 products, of fp32 factors of which one may be bfloat16: then
    with the three bfloat16 terms that hold the other, which takes half as many passes."""
    product = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=(contract, ((), ())),
        preferred_element_type=FLOAT32,
    )
    if a.dtype == b.dtype == FLOAT32:
        return product(a, b, precision=jax.lax.Precision.HIGHEST)
    if a.dtype == FLOAT32:
        return sum(product(term, b) for term in bf16_terms(a))
    return sum(product(a, term) for term in bf16_terms(b))
