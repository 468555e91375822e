"""Every Mosaic GPU kernel, and the public functions with their gradients, beside equations of the
same results, with inputs of any size, and the largest error of one against the other in float64.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from depthjax.kernels import depth_mix, depth_read, phase1, phase2, read_streams
from depthjax.kernels.mosaic_gpu import (
    gather,
    mixture,
    queries,
    queries_backward,
    streams,
    two_phase,
)
from depthjax.residuals import ATTENTION, REGISTRY

EPS, EPS_OUT = 1e-6, 1e-5
ROWS, LIVE, QUERIES, STREAMS = 9, 8, 8, 4
SOURCE = 1  # whose cotangent is gathered


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel and its equations.

    inputs(T, D): arrays; kernel(*arrays) and reference(*arrays): the same results; moved: rows
    [T, D] of bf16 that the kernel has to move; carry: which array the first result replaces in
    place.
    """

    name: str
    inputs: Callable[[int, int], tuple]
    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    moved: float
    carry: int | None = None


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def wide(seed: int, *shape: int) -> jax.Array:
    return normal(seed, *shape, dtype=jnp.float32)


def up(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def rms(x: jax.Array, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def naive_phase_one(rows, directions):
    v = up(rows[:LIVE])
    e = jnp.einsum("ntd,sd->snt", rms(v, EPS), directions, precision="highest")
    return jnp.einsum("snt,ntd->std", jax.nn.softmax(e, axis=1), v), jax.nn.logsumexp(e, axis=1)


def naive_phase_one_backward(rows, directions, _, cotangents, d_lse, d_rows):
    _, pull = jax.vjp(naive_phase_one, up(rows), directions)
    by_rows, du = pull((up(cotangents), d_lse))
    return d_rows + by_rows, du


def naive_mix(rows, newest, u, scale):
    v = jnp.concatenate([up(rows[:LIVE]), up(newest)[None]])
    e = jnp.sum(rms(v, EPS) * u, axis=-1)
    z = jnp.sum(jax.nn.softmax(e, axis=0)[..., None] * v, axis=0)
    return rms(z, EPS) * scale, jax.nn.logsumexp(e, axis=0)


def naive_mix_backward(rows, newest, u, scale, cotangent, d_rows, d_newest):
    (_, lse), pull = jax.vjp(naive_mix, *map(up, (rows, newest, u, scale)))
    by_rows, by_newest, *rest = pull((up(cotangent), jnp.zeros_like(lse)))
    return d_rows + by_rows, up(d_newest) + by_newest, *rest


def naive_merge(p, mixture, lse, u, scale):
    w = jax.nn.sigmoid(jnp.sum(rms(up(p), EPS) * u, axis=-1) - lse)[..., None]
    return rms(up(mixture) + w * (up(p) - up(mixture)), EPS_OUT) * scale, p


def open_and_merge(open_sum, branch, *rest):
    return naive_merge(stored(open_sum + branch), *rest)


def naive_merge_backward(p, mixture, lse, u, scale, d_x, d_p):
    pull = jax.vjp(naive_merge, *map(up, (p, mixture, lse, u, scale)))[1]
    by_p, by_mixture, *rest = pull((up(d_x), up(d_p)))
    return by_mixture, by_p, *rest


def stored(p):
    """p as the kernels store it, in bf16."""
    return p.astype(jnp.bfloat16).astype(p.dtype)


def naive_gather(rows, last, directions, lse, delta):
    index = SOURCE
    cotangents = jnp.concatenate([up(rows[index + 1 :]), up(last)[None]])

    def logits(v, directions):
        return jnp.einsum("td,jd->jt", rms(v, EPS), directions, precision="highest")

    v = up(rows[index])
    a = jnp.exp(logits(v, directions[index:]) - lse[index:])
    g = a * (jnp.sum(cotangents * v, axis=-1) - delta[index:])
    by_v, du = jax.vjp(logits, v, directions[index:])[1](g)
    return jnp.sum(a[..., None] * cotangents, axis=0) + by_v, jnp.pad(du, [(index, 0), (0, 0)])


def naive_streams(h, read, transport, scale):
    z = jnp.einsum("mt,mtd->td", read, up(h), precision="highest")
    mixed = jnp.einsum("nmt,mtd->ntd", transport, up(h), precision="highest")
    return rms(z, EPS) * scale, mixed


def naive_streams_dots(h, by_x, by_mixed, read, scale):
    h, by_x, by_mixed = map(up, (h, by_x, by_mixed))
    z = jnp.einsum("mt,mtd->td", read, h, precision="highest")
    dots = [jnp.sum(row * h, axis=-1) for row in (scale * by_x, z)]
    return *dots, jnp.einsum("ntd,mtd->nmt", by_mixed, h, precision="highest")


def naive_streams_spread(h, by_x, by_mixed, r, k, read, own, transport, scale, columns, factors):
    h, by_x, by_mixed = map(up, (h, by_x, by_mixed))
    z = jnp.einsum("mt,mtd->td", read, h, precision="highest")
    by = read[..., None] * (r[:, None] * scale * by_x - k[:, None] * z) + own[..., None] * h
    by += jnp.einsum("nmt,ntd->mtd", transport, by_mixed, precision="highest")
    by += jnp.einsum("cmt,cd->mtd", factors, columns, precision="highest")
    return by, jnp.sum(by_x * z * r[:, None], axis=0)


def mix_inputs(tokens, width):
    directions = 0.02 * wide(2, width), 1 + 0.1 * wide(3, width)
    return normal(0, ROWS, tokens, width), normal(1, tokens, width), *directions


def mix_backward_inputs(*sizes):
    cotangents = normal(5, *sizes), wide(6, ROWS, *sizes), normal(7, *sizes)
    return *mix_inputs(*sizes), *cotangents


def merge_inputs(tokens, width):
    rows = (normal(seed, tokens, width) for seed in range(3))
    return *rows, 2 + wide(3, tokens), 0.02 * wide(4, width), 1 + 0.1 * wide(5, width)


def phase_two_inputs(tokens, width):
    open_sum, branch, z, lse, *rest = merge_inputs(tokens, width)
    return jnp.stack([branch, z]), jnp.stack([-lse, lse]), open_sum, branch, *rest


def gather_inputs(tokens, width):
    rows, last = normal(0, ROWS, tokens, width), normal(1, tokens, width)
    lse, delta = 2 + wide(3, ROWS, tokens), wide(4, ROWS, tokens)
    return rows, last, 0.02 * wide(2, ROWS, width), lse, delta


def phase_one_inputs(tokens, width):
    return normal(0, ROWS, tokens, width), 0.02 * wide(1, QUERIES, width)


def phase_one_backward_inputs(tokens, width):
    rows, directions = phase_one_inputs(tokens, width)
    _, lse = naive_phase_one(rows, directions)
    cotangents = normal(2, QUERIES, tokens, width), wide(3, QUERIES, tokens)
    return rows, directions, lse, *cotangents, wide(4, ROWS, tokens, width)


def streams_inputs(tokens, width):
    h, m = normal(0, STREAMS, tokens, width), STREAMS
    return h, wide(1, m, tokens), wide(2, m, m, tokens), 1 + 0.1 * wide(3, width)


def streams_cotangents(tokens, width):
    return normal(4, tokens, width), normal(5, STREAMS, tokens, width)


def streams_dots_inputs(tokens, width):
    h, read, _, scale = streams_inputs(tokens, width)
    return h, *streams_cotangents(tokens, width), read, scale


def streams_spread_inputs(tokens, width):
    h, read, transport, scale = streams_inputs(tokens, width)
    small = wide(6, tokens), wide(7, tokens), read, wide(8, STREAMS, tokens), transport
    columns = wide(9, STREAMS + 2, width), wide(10, STREAMS + 2, STREAMS, tokens)
    return h, *streams_cotangents(tokens, width), *small, scale, *columns


def connectors(variant, width):
    """(rule, shapes of its parameters, names of those that `weigh` sees) of a sublayer."""
    rule = REGISTRY[variant](streams=STREAMS)
    shapes = {name: p.shape for name, p in rule.connection(ATTENTION, width).items()}
    return rule, shapes, sorted(set(shapes) - set(rule.projections))


def read_streams_inputs(variant, tokens, width):
    """Streams, the norm's scale (far from 1: a cotangent along the result would leave nothing of
    the read's), columns, and what `weigh` sees."""
    rule, shapes, gates = connectors(variant, width)
    params = {name: 0.3 * wide(i + 1, *shape) for i, (name, shape) in enumerate(shapes.items())}
    columns, scale = width**-0.5 * rule.columns(params), wide(30, width)
    return normal(31, STREAMS, tokens, width), scale, columns, *(params[name] for name in gates)


def read_streams_of(variant, form, h, scale, columns, *gates):
    rule, _, names = connectors(variant, h.shape[-1])
    gates = dict(zip(names, gates, strict=True))
    return read_streams(rule.weigh, EPS, gates, columns, scale, h, implementation=form)


CASES = (
    Case(
        "mix, norm",
        mix_inputs,
        lambda rows, newest, u, scale: mixture.mix(rows, LIVE, newest, u, EPS, scale, rows.dtype),
        naive_mix,
        moved=LIVE + 2,
    ),
    Case(
        "mix backward",
        mix_backward_inputs,
        lambda rows, newest, u, scale, *cotangents: mixture.mix_backward(
            rows, LIVE, newest, u, EPS, scale, *cotangents
        ),
        naive_mix_backward,
        moved=5 * LIVE + 4,
        carry=5,
    ),
    Case(
        "phase 1",
        phase_one_inputs,
        lambda rows, u: queries.phase_one(rows, u, LIVE, EPS),
        naive_phase_one,
        moved=LIVE + QUERIES,
    ),
    Case(
        "phase 1 backward",
        phase_one_backward_inputs,
        lambda rows, u, lse, c, d_lse, d_rows: queries_backward.phase_one_backward(
            rows, c, d_rows, lse, d_lse, u, LIVE, EPS
        ),
        naive_phase_one_backward,
        moved=5 * LIVE + QUERIES,
        carry=5,
    ),
    Case(
        "phase 2",
        merge_inputs,
        lambda open_sum, branch, z, lse, u, scale: two_phase.merge(
            z[None], 0, open_sum, branch, lse, u, scale, None, (EPS, EPS_OUT)
        ),
        open_and_merge,
        moved=5,
    ),
    Case(
        "phase 2 backward",
        lambda *sizes: (*merge_inputs(*sizes)[1:], normal(6, *sizes), normal(7, *sizes)),
        lambda p, z, lse, u, scale, d_x, d_p: two_phase.merge_backward(
            z, p, d_x, d_p, lse, u, scale, (EPS, EPS_OUT)
        ),
        naive_merge_backward,
        moved=6,
    ),
    Case(
        "gather",
        gather_inputs,
        lambda rows, last, *rest: gather.gather(rows, SOURCE, last, *rest, EPS),
        naive_gather,
        moved=ROWS - SOURCE + 3,
    ),
    Case(
        "streams",
        streams_inputs,
        lambda *arrays: streams.mix(*arrays, EPS),
        naive_streams,
        moved=2 * STREAMS + 1,
    ),
    Case(
        "streams' dots",
        streams_dots_inputs,
        streams.dots,
        naive_streams_dots,
        moved=2 * STREAMS + 1,
    ),
    Case(
        "streams' cotangents",
        streams_spread_inputs,
        lambda h, by_x, by_mixed, r, k, read, own, transport, *others: streams.spread(
            h, by_x, by_mixed, (r, k, read, own, transport), *others
        ),
        naive_streams_spread,
        moved=3 * STREAMS + 1,
    ),
)


def pulled(name: str, inputs: Callable, function: Callable, moved: float) -> Case:
    """The public function(implementation, *arrays) and its cotangents, given its own results as
    theirs, with the kernels and, for reference, in XLA."""

    def run(implementation, *arrays):
        out, pull = jax.vjp(functools.partial(function, implementation), *arrays)
        return out, pull(out)

    kernel, reference = (functools.partial(run, form) for form in ("mosaic_gpu", "xla"))
    return Case(name, inputs, kernel, reference, moved)


PUBLIC = (
    pulled(
        "depth_read",
        mix_inputs,
        lambda form, rows, newest, u, scale: depth_read(
            rows, newest, u, LIVE, EPS, scale, implementation=form
        ),
        moved=6 * LIVE + 6,
    ),
    pulled(
        "depth_mix",
        lambda *sizes: mix_inputs(*sizes)[::2],
        lambda form, rows, u: depth_mix(rows, u, implementation=form),
        moved=3 * ROWS + 2,
    ),
    pulled(
        "phase1",
        phase_one_inputs,
        lambda form, rows, u: phase1(rows, u, count=LIVE, eps=EPS, implementation=form),
        moved=6 * LIVE + 2 * QUERIES,
    ),
    pulled(
        "phase2",
        phase_two_inputs,
        lambda form, z, lse, open_sum, branch, u, scale: phase2(
            z,
            lse,
            open_sum,
            branch,
            query=u,
            norm_scale=scale,
            place=1,
            eps=EPS,
            norm_eps=EPS_OUT,
            implementation=form,
        ),
        moved=13,
    ),
    *(
        pulled(
            f"read_streams, {variant}",
            functools.partial(read_streams_inputs, variant),
            functools.partial(read_streams_of, variant),
            moved=9 * STREAMS + 3,
        )
        for variant in ("hc", "mhc")
    ),
)
"""Public functions with their gradients, which do not alter arrays in place here. Their values are
checked in fp32, since a rounded result is a cotangent, and timed in bf16."""


def stack_inputs(tokens, width):
    return normal(0, tokens, width), 0.02 * wide(1, STACK_BLOCKS * QUERIES, width), wide(2, width)


def read_stack(form, embedding, queries, scale):
    """What the last of 32 sublayers in blocks of 8 reads, where each branch hands on what it read;
    the first of a block reads no open sum."""
    blocks = jnp.zeros((STACK_BLOCKS, *embedding.shape), embedding.dtype).at[0].set(embedding)
    x = embedding
    for block in range(STACK_BLOCKS):
        u = queries[block * QUERIES : (block + 1) * QUERIES]
        mixtures, lse = phase1(blocks, u, count=block + 1, eps=EPS, implementation=form)
        open_sum = jnp.zeros_like(embedding)
        x = (rms(up(mixtures[0]), EPS_OUT) * scale).astype(embedding.dtype)
        for place in range(1, QUERIES):
            x, open_sum = phase2(
                mixtures,
                lse,
                open_sum,
                x,
                query=u[place],
                norm_scale=scale,
                place=place,
                eps=EPS,
                norm_eps=EPS_OUT,
                implementation=form,
            )
        if block + 1 < STACK_BLOCKS:
            blocks = blocks.at[block + 1].set(open_sum + x)
    return x


STACK_BLOCKS = 4
STACK_SIZES = 16_384, 2048
"""Tokens and features of the figures that catswe/flash-attention-residuals publishes for Triton
kernels on an A100, forward and backward of such a stack: eager 4061 ms, Liger's kernel 432,
compiled phases 395, its own two phases 184."""
STACK = pulled(
    "stack of 32 reads",
    stack_inputs,
    read_stack,
    moved=sum(6 * n + 2 * QUERIES + 13 * (QUERIES - 1) for n in range(1, STACK_BLOCKS + 1)),
)


def worst_error(case: Case, arrays: tuple) -> float:
    """The largest error beside the largest value, over the results, against float64 on the CPU."""
    actual = jax.tree.map(np.asarray, jax.jit(case.kernel)(*arrays))
    exact = [np.asarray(x, np.float64) for x in arrays]
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        expected = jax.tree.map(np.asarray, jax.jit(case.reference)(*exact))
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return max(_error(np.asarray(got, np.float64), wanted) for got, wanted in pairs)


def _error(got, wanted) -> float:
    if not np.all(np.isfinite(got)):
        return float("inf")
    return float(np.max(np.abs(got - wanted)) / np.max(np.abs(wanted)))
