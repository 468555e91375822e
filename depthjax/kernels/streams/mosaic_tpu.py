"""Reading and mixing streams on a TPU: one kernel forward, one backward; see `read_streams`.

A step of the grid holds a block of tokens of all streams in VMEM, and goes over it twice: once for
what the weights of a token depend on, once for the sums that they weigh. In between, the weights
themselves: small numbers, of which each has all tokens of the block side by side, [groups, group],
so that they fill registers.

Forward, in units of tokens x width: m in, m + 1 out. Backward: 2 m + 1 in, m out. With c the
cotangent of x = s r z, z = sum_j read_j H_j, r = 1 / sqrt(mean(z^2) + eps), G_t that of mixed
stream t, u = s c and k = r^3 (z . u) / D,

    by_read_j = r (u . H_j) - k (z . H_j),      by_transport_tj = G_t . H_j
    by_H_j    = read_j (r u - k z) + sum_t transport_tj G_t + 2 by_squares_j H_j / D
                + the products' part, by_products . columns
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from depthjax.kernels.choice import tpu_interpreter
from depthjax.kernels.over_mesh import FLAT, over_tokens
from depthjax.kernels.streams.blocks import (
    LANES,
    Blocks,
    ByProducts,
    as_columns,
    column_of,
    pairs,
    products,
    put_rows,
    rows_of,
    split,
    total,
    vmem_limit,
)
from depthjax.kernels.streams.spelling import pull_weights, repeating, spelled_out


def fits(streams: jax.Array, columns: jax.Array | None) -> bool:
    """Whether the kernels take streams [m, ..., D] with these columns, all of at most 32 bits."""
    widest = max(x.dtype.itemsize for x in (streams, columns) if x is not None)
    if streams.ndim < 3 or streams.size == 0 or widest > 4:
        return False
    flat = jax.eval_shape(lambda x: x.reshape(len(x), -1, x.shape[-1]), streams)
    return Blocks.of(flat, columns, 0) is not None


def forward(weigh, eps, gates, columns, scale, streams):
    """((x, mixed, write), what the backward pass needs beside its arguments)."""

    def local(_, gates, columns, scale, streams):
        flat = streams.reshape(len(streams), -1, streams.shape[-1])
        x, mixed, small = _forward(weigh, eps, gates, columns, scale, flat)
        write = jnp.swapaxes(small[:, : len(streams)], 0, 1).reshape(len(streams), -1)
        write = write[:, : flat.shape[1]].reshape(streams.shape[:-1])
        return x.reshape(streams.shape[1:]), mixed.reshape(streams.shape), write, small

    axes = (None, None, None, 1), (0, 1, 1, FLAT)
    run = over_tokens(local, streams, *axes)
    *results, small = run(gates, columns, scale, streams)
    return tuple(results), small


def backward(weigh, eps, gates, columns, scale, streams, small, by_x, by_mixed, by_write):
    """The cotangents of gates, columns, scale and streams, in fp32 but for the last."""

    def local(axes, gates, columns, scale, streams, small, by_x, by_mixed, by_write):
        m, width = len(streams), streams.shape[-1]
        flat = streams.reshape(m, -1, width)
        cotangents = by_x.reshape(-1, width), by_mixed.reshape(flat.shape), by_write.reshape(m, -1)
        *by_params, by_streams = _backward(
            weigh, eps, gates, columns, scale, flat, small, *cotangents
        )
        if axes:
            by_params = jax.lax.psum(by_params, axes)
        return *by_params, by_streams.reshape(streams.shape)

    axes = (None, None, None, 1, FLAT, 0, 1, 1), (None, None, None, 1)
    run = over_tokens(local, streams, *axes)
    return run(gates, columns, scale, streams, small, by_x, by_mixed, by_write)


def _flatten(gates, blocks):
    """(gates [P, groups, group], the inverse): each one the same for all tokens of a block."""
    leaves, tree = jax.tree.flatten(gates)
    flat = [leaf.astype(jnp.float32).reshape(-1) for leaf in leaves] or [jnp.zeros(1, jnp.float32)]
    shape = blocks.groups, blocks.group
    flat = jnp.broadcast_to(jnp.concatenate(flat)[:, None, None], (blocks.gates, *shape))

    def unflatten(flat, tokens=shape):
        starts, parts = 0, []
        for leaf in leaves:
            part = flat[starts : starts + leaf.size]
            parts.append(part.reshape(*leaf.shape, *tokens))
            starts += leaf.size
        return jax.tree.unflatten(tree, parts)

    return flat, unflatten


def _column_terms(columns, blocks, order):
    """[m or 1, terms * c, D] of columns [D, c] or [m, D, c]: their terms in the dtype of the
    streams, in that order, c filled up with zeros."""
    if columns is None:
        return []
    columns = columns.astype(jnp.float32)
    columns = jnp.swapaxes(columns[None] if columns.ndim == 2 else columns, 1, 2)
    missing = blocks.padded_columns - blocks.columns
    columns = jnp.pad(columns, [(0, 0), (0, missing), (0, 0)])
    terms = split(columns, blocks.dtype)
    return [jnp.concatenate([terms[i] for i in order[: len(terms)]], axis=1)]


def _pad(x, axis, size, mode="constant"):
    """Zeros, or with mode "edge" the last token again, behind so few that a group is not full."""
    missing = size - x.shape[axis]
    widths = [(0, missing if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, mode) if missing else x


def _pad_streams(x, size):
    """With tokens whose weights are finite where those of the last are; their cotangents are 0."""
    return _pad(x, 1, size, "edge")


def _count(gates):
    """Of their numbers; one where there are none, as a kernel takes no empty array."""
    return sum(leaf.size for leaf in jax.tree.leaves(gates)) or 1


def _forward(weigh, eps, gates, columns, scale, streams):
    """(x [T, D], mixed [m, T, D], small [groups, rows, group]) of streams [m, T, D]; the rows of
    the last: write, read, mean squares and products of each token."""
    tokens = streams.shape[1]
    b = Blocks.of(streams, columns, _count(gates))
    streams = _pad_streams(streams, b.tokens)
    flat, unflatten = _flatten(gates, b)
    terms = _column_terms(columns, b, (0, 1, 2))
    operands = [flat, *terms, scale.astype(jnp.float32)[None], streams]
    m, block, width = b.streams, b.block, b.width
    per_token = pl.BlockSpec((m, block, width), lambda i: (0, i, 0))
    whole = [pl.BlockSpec(x.shape, lambda i, n=x.ndim: (0,) * n) for x in operands[:-1]]
    outputs = [
        jax.ShapeDtypeStruct((b.tokens, width), b.dtype),
        jax.ShapeDtypeStruct(streams.shape, b.dtype),
        jax.ShapeDtypeStruct((b.all_groups, b.small_rows, b.group), jnp.float32),
    ]
    x, mixed, small = pl.pallas_call(
        functools.partial(_forward_kernel, b, weigh, eps, unflatten, bool(terms)),
        grid=(b.steps,),
        in_specs=[*whole, per_token],
        out_specs=[
            pl.BlockSpec((block, width), lambda i: (i, 0)),
            per_token,
            pl.BlockSpec((b.groups, b.small_rows, b.group), lambda i: (i, 0, 0)),
        ],
        out_shape=outputs,
        scratch_shapes=[
            pltpu.VMEM((b.groups, LANES, b.group), jnp.float32),
            pltpu.VMEM((b.group, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=vmem_limit()
        ),
        cost_estimate=b.cost(operands, outputs, passes=2),
        interpret=tpu_interpreter(),
        name="read_streams",
    )(*operands)
    return x[:tokens], mixed[:, :tokens], small


def _forward_kernel(b, weigh, eps, unflatten, projects, gates_ref, *refs):
    columns_ref = refs[0] if projects else None
    scale_ref, streams_ref, x_ref, mixed_ref, small_ref, coefficients, columns_of = refs[projects:]
    m = b.streams

    def measure(i, _):
        def chunk(start):
            rows = b.rows(i, start)
            wide = [[_wide(streams_ref, j, rows, lanes) for lanes in b.lanes] for j in range(m)]
            sums = [total([x * x for x in parts]) for parts in wide]
            columns_of[b.rows(0, start), :] = as_columns([s / b.width for s in sums])

        found = products(b, columns_ref, streams_ref, i, beside=chunk)
        small_ref[i, 2 * m : 3 * m, :] = columns_of[...].T[:m]
        for n, one in enumerate(found):
            start = 3 * m + n * b.columns
            small_ref[i, start : start + b.columns, :] = one

    jax.lax.fori_loop(0, b.groups, measure, None)
    with repeating(spelled_out):
        read, write, transport = weigh(unflatten(gates_ref[...]), *b.measured(small_ref))
    put_rows(small_ref, 0, [*write, *read])
    put_rows(coefficients, 0, [*read, *(transport[t, j] for t in range(m) for j in range(m))])

    def mix(i, _):
        columns_of[...] = coefficients[i].T

        def chunk(start):
            rows, weights = b.rows(i, start), columns_of[b.rows(0, start), :]
            weight = column_of(weights)
            sums, square = [], []
            for lanes in b.lanes:
                old = [_wide(streams_ref, j, rows, lanes) for j in range(m)]
                for t in range(m):
                    new = sum(weight(m + t * m + j) * old[j] for j in range(m))
                    mixed_ref[t, rows, lanes] = new.astype(b.dtype)
                sums.append(sum(weight(j) * old[j] for j in range(m)))
                square.append(sums[-1] * sums[-1])
            inverse = jax.lax.rsqrt(total(square) / b.width + eps)
            for lanes, x in zip(b.lanes, sums, strict=True):
                x_ref[rows, lanes] = (x * inverse * scale_ref[:, lanes]).astype(b.dtype)

        b.chunks(chunk)

    jax.lax.fori_loop(0, b.groups, mix, None)


def _wide(ref, j, rows, lanes):
    return ref[j, rows, lanes].astype(jnp.float32)


def _backward(weigh, eps, gates, columns, scale, streams, small, by_x, by_mixed, by_write):
    """The cotangents of gates, columns, scale, and of streams [m, T, D]."""
    tokens = streams.shape[1]
    b = Blocks.of(streams, columns, _count(gates))
    streams, by_mixed = _pad_streams(streams, b.tokens), _pad(by_mixed, 1, b.tokens)
    by_x = _pad(by_x, 0, b.tokens)
    by_write = _pad(by_write.astype(jnp.float32), 1, b.all_groups * b.group)
    by_write = jnp.swapaxes(by_write.reshape(b.streams, -1, b.group), 0, 1)
    flat, unflatten = _flatten(gates, b)
    terms = _column_terms(columns, b, (0, 1, 0))  # beside terms 0, 0, 1 of what they meet
    resident = [flat, *terms, scale.astype(jnp.float32)[None]]
    operands = [*resident, small, by_write, by_x, by_mixed, streams]

    m, width, parts, steps = b.streams, b.width, b.parts, b.steps // b.parts

    def of_block(*shape):
        return lambda p, i: tuple(p * steps + i if s else 0 for s in shape)

    per_token = pl.BlockSpec((m, b.block, width), of_block(0, 1, 0))
    sums = [(b.gates, b.groups, b.group), *_column_sums(b), (8, width)]
    outputs = [jax.ShapeDtypeStruct((parts, *s), jnp.float32) for s in sums]
    outputs.append(jax.ShapeDtypeStruct(streams.shape, b.dtype))
    *by_params, by_streams = pl.pallas_call(
        functools.partial(_backward_kernel, b, weigh, eps, unflatten, bool(terms)),
        grid=(parts, steps),
        in_specs=[
            *(pl.BlockSpec(x.shape, lambda p, i, n=x.ndim: (0,) * n) for x in resident),
            pl.BlockSpec((b.groups, b.small_rows, b.group), of_block(1, 0, 0)),
            pl.BlockSpec((b.groups, m, b.group), of_block(1, 0, 0)),
            pl.BlockSpec((b.block, width), of_block(1, 0)),
            per_token,
            per_token,
        ],
        out_specs=[
            *(pl.BlockSpec((None, *s), lambda p, i, s=s: (p, *[0 for _ in s])) for s in sums),
            per_token,
        ],
        out_shape=outputs,
        scratch_shapes=[
            pltpu.VMEM((b.groups, LANES, b.group), jnp.float32),
            pltpu.VMEM((b.group, LANES), jnp.float32),
            pltpu.VMEM((b.block, width), jnp.float32),
            pltpu.VMEM((b.group // b.paired, m, m * b.paired), jnp.float32),
            *ByProducts.scratch(b),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit()
        ),
        cost_estimate=b.cost(operands, outputs, passes=4),
        interpret=tpu_interpreter(),
        name="read_streams_backward",
    )(*operands)
    by_gates = unflatten(jnp.sum(by_params[0], axis=(0, 2, 3)), ())
    by_columns = None
    if columns is not None:
        by_columns = jnp.swapaxes(jnp.sum(by_params[1], axis=0)[:, : b.columns], 1, 2)
        by_columns = by_columns if b.own_columns else by_columns[0]
    by_scale = jnp.sum(by_params[-1], axis=(0, 1))
    return by_gates, by_columns, by_scale, by_streams[:, :tokens]


def _column_sums(b):
    return [(b.column_blocks, b.padded_columns, b.width)] if b.columns else []


def _backward_kernel(b, weigh, eps, unflatten, projects, gates_ref, *refs):
    columns_ref = refs[0] if projects else None
    scale_ref, small_ref, by_write_ref, *refs = refs[projects:]
    by_x_ref, by_mixed_ref, streams_ref, by_gates_ref, *refs = refs
    by_columns_ref = refs[0] if projects else None
    by_scale_ref, by_streams_ref, coefficients, columns_of, mixture, few, *scratch = refs[projects:]
    by_products = ByProducts(b, *scratch) if projects else None
    m = b.streams
    step = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)

    @pl.when(pl.program_id(1) == 0)
    def _():
        for ref in (by_gates_ref, by_scale_ref, *([by_columns_ref] if projects else [])):
            ref[...] = jnp.zeros_like(ref)

    def read_column(i):
        columns_of[:, : b.small_rows] = small_ref[i].T

    def dots(i, _):
        read_column(i)

        def chunk(start):
            rows, weights = b.rows(i, start), columns_of[b.rows(0, start), :]
            by_u, by_z = [[] for _ in range(m)], [[] for _ in range(m)]
            for lanes in b.lanes:
                u = by_x_ref[rows, lanes].astype(jnp.float32) * scale_ref[:, lanes]
                old = [_wide(streams_ref, j, rows, lanes) for j in range(m)]
                z = sum(weights[:, m + j : m + j + 1] * old[j] for j in range(m))
                mixture[rows, lanes] = z
                for j in range(m):
                    by_u[j].append(u * old[j])
                    by_z[j].append(z * old[j])
            columns_of[b.rows(0, start), :] = as_columns([total(x) for x in (*by_u, *by_z)])

        found = pairs(b, by_mixed_ref, streams_ref, few, i, beside=chunk)
        coefficients[i] = columns_of[...].T
        for j, one in enumerate(found):
            coefficients[i, (2 + j) * m : (3 + j) * m, :] = one

    jax.lax.fori_loop(0, b.groups, dots, None)
    weights, by_gates, by_measured = _pull(
        b, weigh, eps, unflatten(gates_ref[...]), small_ref, by_write_ref, coefficients
    )
    put_rows(coefficients, 0, weights)
    leaves = [x.reshape(-1, b.groups, b.group) for x in jax.tree.leaves(by_gates)]
    if leaves:
        by_gates_ref[...] += b.tokens_of(jnp.concatenate(leaves), step, (1, 2))
    if projects:
        by_products.put(b.tokens_of(by_measured[0], step, _last_two(by_measured[0])))

    def finish(i, _):
        columns_of[...] = coefficients[i].T
        if projects:
            by_products.start(i, by_columns_ref, streams_ref, step)

        def chunk(start):
            rows, weights = b.rows(i, start), columns_of[b.rows(0, start), :]
            weight = column_of(weights)
            for lanes in b.lanes:
                c = by_x_ref[rows, lanes].astype(jnp.float32)
                old = [_wide(streams_ref, j, rows, lanes) for j in range(m)]
                new = [_wide(by_mixed_ref, t, rows, lanes) for t in range(m)]
                z = mixture[rows, lanes]
                by_scale = b.tokens_of(c * z * weight(0), step, (-1, 0), i * b.group + start)
                by_scale_ref[:, lanes] += jnp.sum(by_scale.reshape(-1, 8, c.shape[1]), axis=0)
                by_z = weight(0) * (c * scale_ref[:, lanes]) - weight(1) * z
                for j in range(m):
                    by = weight(2 + j) * by_z + weight(2 + m + j) * old[j]
                    by += sum(weight(2 + 2 * m + t * m + j) * new[t] for t in range(m))
                    if projects:
                        by += by_products.at(j, columns_ref, start, lanes)
                    by_streams_ref[j, rows, lanes] = by.astype(b.dtype)

        b.chunks(chunk)

    jax.lax.fori_loop(0, b.groups, finish, None)


def _pull(b, weigh, eps, gates, small_ref, by_write_ref, dots_ref):
    """(what a token's cotangents are weighed with: r, k, read, 2 by_squares / D, transport; by
    gates; by products and squares), each number [groups, group]."""
    m = b.streams
    by_u, by_z = rows_of(dots_ref, 0, m), rows_of(dots_ref, m, m)
    by_transport = [[dots_ref[:, (2 + j) * m + t, :] for j in range(m)] for t in range(m)]
    by_transport = jnp.stack([jnp.stack(x) for x in by_transport])
    measured = b.measured(small_ref)
    with repeating(spelled_out):
        (read, _, transport), pull = jax.vjp(weigh, gates, *measured)
        dots, by_write = (by_u, by_z, by_transport), rows_of(by_write_ref, 0, m)
        norm, by_gates, by_measured = pull_weights(pull, eps, b.width, read, dots, by_write)
    by_squares = by_measured[-1] * (2 / b.width)
    flat = [transport[t, j] for t in range(m) for j in range(m)]
    return [*norm, *read, *by_squares, *flat], by_gates, by_measured


def _last_two(x):
    return x.ndim - 2, x.ndim - 1
