"""The backward pass of the mixture on TPU: each live source is read once, and its cotangent is
added where it lies.

Grid (parts, token blocks of a part, steps). The first steps of a token block bring the live rows
into VMEM, a few at a time, and mix them again, as the forward kernel does; between them and the
rest stands the cotangent c of the mixture z (with the RMSNorm behind it, of what that returned):

    c = r (s y' - h mean(s y' h)),   h = r z,  r = 1 / sqrt(mean(z^2) + eps),   ds = sum y' h

with y' the cotangent that is given and s the scale. The other steps take one row each:

    g_i  = p_i (c . v_i - c . z)
    dv_i = p_i c + g_i rho_i (u - n_i e_i / D),     du = sum over tokens and sources of g_i n_i

(Attention Residuals, arXiv 2603.15031; see `read` for the symbols; under a sigmoid g_i = p_i
(1 - p_i) c . v_i, and with raw keys rho = 1 and e drops out of dv). Each part, one a TensorCore,
sums du and ds over its tokens in an output block of its own.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from depthjax.kernels.choice import tpu_interpreter
from depthjax.kernels.mixture import tiles
from depthjax.kernels.mixture.mosaic_tpu import (
    add_rows,
    groups,
    mean_count,
    scorer,
    start_mixture,
)
from depthjax.kernels.mixture.rule import PLAIN, MixtureRule
from depthjax.kernels.mixture.tiles import FLOAT32, lane_tiles, over_chunks, sum_lanes, wide

SUBLANES = 8


class _Options(NamedTuple):
    """What a kernel is made for. tokens: of the array, where the last block is not full."""

    rule: MixtureRule
    group: int
    has_newest: bool
    has_scale: bool
    adds: bool
    adds_newest: bool
    tokens: int | None


def mix_backward(
    rows: jax.Array,
    count: jax.Array | int,
    newest: jax.Array | None,
    direction: jax.Array,
    eps: jax.Array | float,
    scale: jax.Array | None,
    cotangent: jax.Array,
    d_rows: jax.Array | None,
    d_newest: jax.Array | None,
    rule: MixtureRule = PLAIN,
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array | None]:
    """(d_rows [N, T, D], d_newest [T, D], du fp32 [D], d_scale fp32 [D]) of `mosaic_tpu.mix` from
    that of its result [T, D]; None for what was not given.

    d_rows: [N, T, D] in a dtype of its own, to which those of the live rows are added in place; the
    others stay as they are. None: the rows of the result that are not live hold anything. d_newest:
    like `newest`, to which its own is added in place; or None.
    """
    n, tokens, width = rows.shape
    most, skipped = rule.most(n, newest is not None), rule.skipped(count, newest is not None)
    seen, windowed = count - skipped, rule.window is not None
    like = rows if d_rows is None else d_rows
    group, block = _sizes(rows, most, (newest, d_newest), cotangent, like)
    blocks = pl.cdiv(tokens, block)
    parts = 2 if blocks % 2 == 0 else 1
    blocks //= parts
    ragged = tokens if tokens % block else None
    has = (x is not None for x in (newest, scale, d_rows, d_newest))
    options = _Options(rule, group, *has, ragged)
    token_spec = pl.BlockSpec((block, width), lambda p, i, r, bounds: (p * blocks + i, 0))
    whole = pl.BlockSpec((1, width), lambda p, i, r, bounds: (0, 0))
    part_sum = pl.BlockSpec((SUBLANES, width), lambda p, i, r, bounds: (p, 0))
    row_spec = pl.BlockSpec((None, block, width), _one_row(blocks, windowed))
    member_specs = [
        pl.BlockSpec((None, block, width), tiles.grouped_row(k, group, blocks, windowed))
        for k in range(group)
    ]
    given = [(pl.BlockSpec(memory_space=pltpu.SMEM), jnp.asarray(eps, FLOAT32).reshape(1))]
    given += [(whole, direction.astype(FLOAT32)[None])]
    given += [] if scale is None else [(whole, scale.astype(FLOAT32)[None])]
    given += [(token_spec, cotangent)]
    given += [] if newest is None else [(token_spec, newest)]
    # JAX's interpreter pads the array of a ragged last block and cannot alias it then.
    in_place, aliases = not (ragged and tpu_interpreter()), {}
    last = 2 + (scale is not None)  # of the results
    for spec, array, result in (token_spec, d_newest, last), (row_spec, d_rows, 0):
        given += [] if array is None else [(spec, array)]
        if array is not None and in_place:
            aliases[len(given)] = result  # the prefetched scalars come first
    given += [(spec, rows) for spec in member_specs]

    sums = jax.ShapeDtypeStruct((parts * SUBLANES, width), FLOAT32)
    results = [(row_spec, jax.ShapeDtypeStruct(like.shape, like.dtype)), (part_sum, sums)]
    results += [] if scale is None else [(part_sum, sums)]
    if newest is not None:
        results += [(token_spec, jax.ShapeDtypeStruct(newest.shape, newest.dtype))]
    steps, live = groups(seen, group), mean_count(most, seen, n)
    out = pl.pallas_call(
        functools.partial(_kernel, options),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(parts, blocks, steps + seen),
            in_specs=[spec for spec, _ in given],
            out_specs=[spec for spec, _ in results],
            scratch_shapes=_scratch(most, block, width, rows.dtype),
        ),
        out_shape=[shape for _, shape in results],
        input_output_aliases=aliases,
        compiler_params=tiles.compiler_params("parallel", "arbitrary", "arbitrary"),
        cost_estimate=_cost(rows, live, (newest, d_newest), scale, cotangent, d_rows, parts),
        interpret=tpu_interpreter(),
        name="depth_mix_backward",
    )(tiles.scalars(skipped, seen, steps), *(array for _, array in given))
    found, du, *rest = out
    if d_rows is not None and not in_place:  # dead rows stay as they are
        added = rule.seen(n, count, newest is not None)[:, None, None]
        found = jnp.where(added, found, d_rows)
    d_scale = jnp.sum(rest.pop(0), axis=0) if scale is not None else None
    return found, rest[0] if rest else None, jnp.sum(du, axis=0), d_scale


def _one_row(blocks: int, windowed: bool):
    """The index map of the steps that take a row each, behind those that take groups."""

    def row(p, i, r, bounds):
        place = jnp.minimum(jnp.maximum(r - bounds[2], 0), jnp.maximum(bounds[1] - 1, 0))
        return tiles.window_row(place, bounds[0], windowed), p * blocks + i, 0

    return row


def _scratch(most: int, block: int, width: int, dtype) -> list:
    """What `_kernel` keeps from step to step."""
    column, columns = (pltpu.VMEM((*lead, block, 1), FLOAT32) for lead in ((), (most,)))
    mixture, held = pltpu.VMEM((block, width), FLOAT32), pltpu.VMEM((most, block, width), dtype)
    return [column, column, mixture, column, column, column, held, columns, columns]


def fits(rows: jax.Array, newest: jax.Array | None) -> bool:
    """Whether a TPU has room for all rows [N, ..., D] of the fewest tokens that a block may have,
    with cotangents in fp32."""
    sizes = _token_bytes(rows, rows.shape[0], (newest, newest), 4, rows.dtype.itemsize, 1)
    return tiles.PIECE * sizes <= tiles.room()


def _token_bytes(rows, most, newest, cotangent: int, like: int, group: int) -> int:
    """Bytes of a token in a block that holds `most` rows, `group` of them a step; newest: the
    source and what its cotangent is added to; cotangent, like: bytes of a number of those."""
    width, size = rows.shape[-1], rows.dtype.itemsize
    held = most * (width * size + 2 * 4 * tiles.LANES)
    around = width * (4 + 2 * cotangent + 4 * like + 2 * _moved_newest(newest) * size)
    return held + around + 2 * group * width * size + 5 * 4 * tiles.LANES


def _moved_newest(newest) -> int:
    """How often one as wide as the newest source comes or goes: it, its cotangent, and what that is
    added to."""
    source, added_to = newest
    return 2 * (source is not None) + (added_to is not None)


def _sizes(rows, most, newest, cotangent, like) -> tuple[int, int]:
    """(rows of a group, tokens of a block), which holds `most` rows."""
    tokens, sizes = rows.shape[1], (cotangent.dtype.itemsize, like.dtype.itemsize)
    for group in tiles.GROUPS:
        block = tiles.token_block(tokens, _token_bytes(rows, most, newest, *sizes, group))
        if block >= min(tokens, 2 * tiles.LANES):
            break
    return group, block


def _cost(rows, live, newest, scale, cotangent, d_rows, parts):
    (_, tokens, width), size = rows.shape, rows.dtype.itemsize
    like = rows if d_rows is None else d_rows
    by_token = live * (size + like.dtype.itemsize * (1 + (d_rows is not None)))
    by_token += cotangent.dtype.itemsize + size * _moved_newest(newest)
    vectors = 4 * width * (1 + SUBLANES * parts) * (1 + (scale is not None))
    sources = live + (newest[0] is not None)
    return pl.CostEstimate(
        flops=int(tokens * width * (16 * sources + 1 + 14 * (scale is not None))),
        transcendentals=int(tokens * (4 * sources + 2)),
        bytes_accessed=int(tokens * width * by_token + vectors),
    )


def _kernel(options, bounds, eps_ref, u_ref, *refs):
    refs = list(refs)
    scale_ref = refs.pop(0) if options.has_scale else None
    cotangent_ref = refs.pop(0)
    newest_ref = refs.pop(0) if options.has_newest else None
    old_newest_ref = refs.pop(0) if options.adds_newest else None
    old_ref = refs.pop(0) if options.adds else None
    rows = [refs.pop(0) for _ in range(options.group)]
    d_row_ref, du_ref = refs.pop(0), refs.pop(0)
    d_scale_ref = refs.pop(0) if options.has_scale else None
    d_newest_ref = refs.pop(0) if options.has_newest else None
    *state, own_e, own_rho, delta_ref, held_ref, e_ref, rho_ref = refs
    most_ref, _, c_ref = state  # the weighted sum, until c takes its place
    step, eps, (_, count, steps) = pl.program_id(2), eps_ref[0], (bounds[k] for k in range(3))
    block, first = c_ref.shape[0], _first_token(c_ref)

    @pl.when((step == 0) & (pl.program_id(1) == 0))
    def _():
        du_ref[...] = jnp.zeros_like(du_ref)
        if options.has_scale:
            d_scale_ref[...] = jnp.zeros_like(d_scale_ref)

    def keep(k, tokens, e, rho):
        row = step * options.group + k
        e_ref[row, tokens], rho_ref[row, tokens] = e, rho
        held_ref[row, tokens] = rows[k][tokens]

    rule, score = options.rule, scorer(options.rule, u_ref, eps)
    start_mixture(step == 0, rule, score, newest_ref, state, (own_e, own_rho))

    @pl.when(step < steps)
    def _():
        add_rows(count - step * options.group, rule, score, rows, state, keep)

    source = functools.partial(
        _source, options, first, c_ref=c_ref, u_ref=u_ref, lse_ref=most_ref, delta_ref=delta_ref
    )

    @pl.when(step == steps - 1)
    def _():
        turn = functools.partial(_turn, options, first, eps, scale_ref, cotangent_ref)
        over_chunks(block, lambda at: turn(d_scale_ref, state, delta_ref, at))
        if options.has_newest:
            own = newest_ref, own_e, own_rho, old_newest_ref, d_newest_ref, du_ref
            over_chunks(block, lambda at: source(at, *own))
        if options.adds:

            @pl.when(count == 0)
            def _():
                d_row_ref[...] = old_ref[...]

    @pl.when(step >= steps)
    def _():
        row = step - steps
        one = held_ref.at[row], e_ref.at[row], rho_ref.at[row], old_ref, d_row_ref, du_ref
        over_chunks(block, lambda at: source(at, *one))


def _first_token(ref):
    """Of this step's block."""
    return (pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)) * ref.shape[0]


def _of_tokens(options, first, tokens, x):
    """x [tokens, ...] with zeros where the array has no such tokens."""
    if options.tokens is None:
        return x
    token = first + tokens.start + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(token < options.tokens, x, 0)


def _sum_tokens(ref, lanes, x):
    """Adds the sum over tokens of x [tokens, lanes] to ref [8, D], up to a sum over sublanes."""
    halves = [x[start : start + SUBLANES] for start in range(0, x.shape[0], SUBLANES)]
    ref[:, lanes] += sum(halves[1:], halves[0])


def _turn(options, first, eps, scale_ref, cotangent_ref, d_scale_ref, state, delta_ref, tokens):
    """From the weighted sum of the sources to the cotangent c of the mixture, the log-sum-exp and
    delta = c . z."""
    most_ref, total_ref, sum_ref = state
    width = sum_ref.shape[-1]
    total = total_ref[tokens]
    inverse = 1 / total
    most_ref[tokens] = most_ref[tokens] + jnp.log(total)
    tiles_of = lane_tiles(width)
    if not options.has_scale:
        products = []
        for lanes in tiles_of:
            c = wide(cotangent_ref, tokens, lanes)
            products.append(c * sum_ref[tokens, lanes])
            sum_ref[tokens, lanes] = c
        delta_ref[tokens] = sum_lanes(products) * inverse
        return
    squares, products = [], []
    for lanes in tiles_of:
        z = sum_ref[tokens, lanes]
        squares.append(z * z)
        products.append(wide(cotangent_ref, tokens, lanes) * scale_ref[:, lanes] * z)
    r = jax.lax.rsqrt(sum_lanes(squares) * inverse * inverse / width + eps)
    along = sum_lanes(products) * inverse * r  # of s y' along h
    delta_ref[tokens] = along * (eps * r * r)  # since h . h = D (1 - eps r^2)
    for lanes in tiles_of:
        given = wide(cotangent_ref, tokens, lanes)
        h = sum_ref[tokens, lanes] * (inverse * r)
        _sum_tokens(d_scale_ref, lanes, _of_tokens(options, first, tokens, given * h))
        sum_ref[tokens, lanes] = r * (given * scale_ref[:, lanes] - h * (along / width))


def _source(
    options, first, tokens, v_ref, e_ref, rho_ref, old_ref, d_ref, du_ref,
    *, c_ref, u_ref, lse_ref, delta_ref,
):  # fmt: skip
    """The cotangent of one source, with what was there before added, into d_ref; its share of du
    is added to du_ref."""
    width = v_ref.shape[-1]
    products = [c_ref[tokens, lanes] * wide(v_ref, tokens, lanes) for lanes in lane_tiles(width)]
    e, rho = e_ref[tokens], rho_ref[tokens]
    if options.rule.scores == "sigmoid":
        p = jax.nn.sigmoid(e)
        g = p * (1 - p) * sum_lanes(products) * rho
    else:
        p = jnp.exp(e - lse_ref[tokens])
        g = p * (sum_lanes(products) - delta_ref[tokens]) * rho
    radial = g * rho * e / width
    for lanes in lane_tiles(width):
        v = wide(v_ref, tokens, lanes)
        d = p * c_ref[tokens, lanes] + g * u_ref[:, lanes]
        d = d if options.rule.keys == "raw" else d - radial * v
        d = d if old_ref is None else d + wide(old_ref, tokens, lanes)
        d_ref[tokens, lanes] = d.astype(d_ref.dtype)
        _sum_tokens(du_ref, lanes, _of_tokens(options, first, tokens, g * v))
