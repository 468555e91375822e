"""The mixture of depth sources on TPU: each live row is read once, with an online softmax.

Grid (token blocks, groups of rows): a step mixes a few rows of the buffer into the mixture so far,
as in flash attention with one query. The number of groups is that of the live rows, which may be
traced, so dead rows cost neither bytes nor steps.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from depthjax.kernels.choice import tpu_interpreter
from depthjax.kernels.mixture import tiles
from depthjax.kernels.mixture.rule import PLAIN, MixtureRule
from depthjax.kernels.mixture.tiles import FLOAT32, lane_tiles, over_chunks, sum_lanes, wide


def mix(
    rows: jax.Array,
    count: jax.Array | int,
    newest: jax.Array | None,
    direction: jax.Array,
    eps: jax.Array | float,
    scale: jax.Array | None = None,
    dtype: jax.typing.DTypeLike = FLOAT32,
    rule: MixtureRule = PLAIN,
) -> tuple[jax.Array, jax.Array]:
    """(mixture [T, D] of `dtype`, log-sum-exp fp32 [T]) of the first `count` of rows [N, T, D] and
    of newest [T, D] under direction [D].

    scale: [D], of the RMSNorm that then follows the mixture, of the same eps. At least one source
    is live. Under a sigmoid the log-sum-exp is 0.
    """
    (n, tokens, width), itemsize = rows.shape, rows.dtype.itemsize
    most, skipped = rule.most(n, newest is not None), rule.skipped(count, newest is not None)
    count, windowed = count - skipped, rule.window is not None
    mean = mean_count(most, count, n)
    extra = width * (4 + 2 * (itemsize * (newest is not None) + jnp.dtype(dtype).itemsize))
    group, block = _sizes(tokens, width * 2 * itemsize, extra + 3 * 4 * tiles.LANES)
    blocks, steps = pl.cdiv(tokens, block), groups(count, group)
    options = {"has_newest": newest is not None, "has_scale": scale is not None}
    kernel = functools.partial(_kernel, rule=rule, group=group, **options)
    by_token = pl.BlockSpec((block, width), lambda i, r, bounds: (i, 0))
    whole = pl.BlockSpec((1, width), lambda i, r, bounds: (0, 0))
    members = [
        pl.BlockSpec((None, block, width), tiles.grouped_row(k, group, windowed=windowed))
        for k in range(group)
    ]
    given = [(pl.BlockSpec(memory_space=pltpu.SMEM), jnp.asarray(eps, FLOAT32).reshape(1))]
    given += [(whole, direction.astype(FLOAT32)[None])]
    given += [] if scale is None else [(whole, scale.astype(FLOAT32)[None])]
    given += [] if newest is None else [(by_token, newest)]
    given += [(spec, rows) for spec in members]
    out, lse = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(blocks, steps),
            in_specs=[spec for spec, _ in given],
            out_specs=[by_token, pl.BlockSpec((None, 1, block), lambda i, r, bounds: (i, 0, 0))],
            scratch_shapes=[
                pltpu.VMEM((block, 1), FLOAT32),
                pltpu.VMEM((block, 1), FLOAT32),
                pltpu.VMEM((block, width), FLOAT32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((tokens, width), dtype),
            jax.ShapeDtypeStruct((blocks, 1, block), FLOAT32),
        ],
        compiler_params=tiles.compiler_params("parallel", "arbitrary"),
        cost_estimate=_cost(rows, mean, newest, scale, dtype, blocks * block),
        interpret=tpu_interpreter(),
        name="depth_mix",
    )(tiles.scalars(skipped, count), *(array for _, array in given))
    return out, lse.reshape(-1)[:tokens]


def _sizes(tokens: int, row: int, other: int) -> tuple[int, int]:
    """(rows of a group, tokens of a block) from the bytes a token of a row and of all else: as
    many rows as leave room for 128 tokens."""
    for group in tiles.GROUPS:
        block = tiles.token_block(tokens, group * row + other)
        if block >= min(tokens, tiles.LANES):
            break
    return group, block


def groups(count: jax.Array | int, size: int) -> jax.Array | int:
    """How many groups hold `count` rows, at least one."""
    return (
        max(pl.cdiv(count, size), 1)
        if isinstance(count, int)
        else jnp.maximum((count + size - 1) // size, 1)
    )


def mean_count(most: int, count: jax.Array | int, rows: int = 0) -> float:
    """The rows that are read, where their number is known, else the mean over 1..rows live ones, of
    which at most `most` are read."""
    rows = max(rows, most)
    return count if isinstance(count, int) else most - most * (most - 1) / (2 * rows)


def _cost(rows, count, newest, scale, dtype, padded):
    (_, tokens, width), itemsize = rows.shape, rows.dtype.itemsize
    sources = count + (newest is not None)
    vectors = 4 * width * (1 + (scale is not None))
    by_token = sources * itemsize + jnp.dtype(dtype).itemsize
    return pl.CostEstimate(
        flops=int(tokens * width * (6 * sources + 1 + 4 * (scale is not None))),
        transcendentals=int(tokens * (3 * sources + 2)),
        bytes_accessed=int(tokens * width * by_token + 4 * padded + vectors),
    )


def _kernel(bounds, eps_ref, u_ref, *refs, rule, group, has_newest, has_scale):
    refs = list(refs)
    scale_ref = refs.pop(0) if has_scale else None
    newest_ref = refs.pop(0) if has_newest else None
    rows, (out_ref, lse_ref, most_ref, total_ref, sum_ref) = refs[:group], refs[group:]
    step, eps = pl.program_id(1), eps_ref[0]
    state, score = (most_ref, total_ref, sum_ref), scorer(rule, u_ref, eps)
    start_mixture(step == 0, rule, score, newest_ref, state)
    add_rows(bounds[1] - step * group, rule, score, rows, state)

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        width = out_ref.shape[-1]

        def finish(tokens):
            total = total_ref[tokens]
            inverse = 1 / total
            most_ref[tokens] = most_ref[tokens] + jnp.log(total)
            if has_scale:
                squares = [wide(sum_ref, tokens, lanes) ** 2 for lanes in lane_tiles(width)]
                mean = sum_lanes(squares) * inverse * inverse / width
                inverse = inverse * jax.lax.rsqrt(mean + eps)
            for lanes in lane_tiles(width):
                z = sum_ref[tokens, lanes] * inverse
                z = z * scale_ref[:, lanes] if has_scale else z
                out_ref[tokens, lanes] = z.astype(out_ref.dtype)

        over_chunks(out_ref.shape[0], finish)
        lse_ref[...] = as_row(most_ref)


def scorer(rule: MixtureRule, u_ref, eps) -> Callable:
    """(ref, tokens) -> (e, rho)."""
    return functools.partial(tiles.score, u_ref=u_ref, eps=eps, keys=rule.keys)


def start_mixture(condition, rule, score, newest_ref, state, keep=None):
    """Begins the online softmax with the newest source, or with none: state = (largest logit,
    sum of exponentials, both [block, 1], and weighted sum [block, D]). A sigmoid's state has 0 and
    1 there. keep: (e, rho) refs."""
    most_ref, total_ref, sum_ref = state
    separate = rule.scores == "sigmoid"

    @pl.when(condition)
    def _():
        if newest_ref is None:
            most_ref[...] = jnp.full_like(most_ref, 0 if separate else -jnp.inf)
            total_ref[...] = jnp.full_like(total_ref, separate)
            sum_ref[...] = jnp.zeros_like(sum_ref)
            return

        def begin(tokens):
            e, rho = score(newest_ref, tokens)
            most_ref[tokens] = jnp.zeros_like(e) if separate else e
            total_ref[tokens] = jnp.ones_like(e)
            for lanes in lane_tiles(newest_ref.shape[-1]):
                z = wide(newest_ref, tokens, lanes)
                sum_ref[tokens, lanes] = jax.nn.sigmoid(e) * z if separate else z
            if keep is not None:
                keep[0][tokens], keep[1][tokens] = e, rho

        over_chunks(newest_ref.shape[0], begin)


def add_rows(live, rule, score, rows, state, keep=None):
    """Takes the first `live` of the blocks `rows` into the online softmax. keep: called with (k,
    tokens, e, rho) of each."""
    most_ref, total_ref, sum_ref = state

    def add(members, tokens):
        scores = [score(row, tokens) for row in members]
        if keep is not None:
            for k, (e, rho) in enumerate(scores):
                keep(k, tokens, e, rho)
        if rule.scores == "sigmoid":
            shrink, weights = 1, [jax.nn.sigmoid(e) for e, _ in scores]
        else:
            before = most_ref[tokens]
            most = functools.reduce(jnp.maximum, (e for e, _ in scores), before)
            shrink, weights = jnp.exp(before - most), [jnp.exp(e - most) for e, _ in scores]
            most_ref[tokens] = most
            total_ref[tokens] = total_ref[tokens] * shrink + sum(weights)
        for lanes in lane_tiles(sum_ref.shape[-1]):
            z = sum_ref[tokens, lanes] * shrink
            for row, weight in zip(members, weights, strict=True):
                z += weight * wide(row, tokens, lanes)
            sum_ref[tokens, lanes] = z

    for size in range(1, len(rows) + 1):
        enough = live >= size if size == len(rows) else live == size
        members = rows[:size]

        @pl.when(enough)
        def _(members=members):
            over_chunks(sum_ref.shape[0], functools.partial(add, members))


def as_row(ref) -> jax.Array:
    """[1, tokens] of [tokens, 1]."""
    return jnp.broadcast_to(ref[...], (ref.shape[0], tiles.LANES)).T[:1]
