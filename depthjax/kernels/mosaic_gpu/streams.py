"""Reading and mixing the streams of Hyper-Connections, and their cotangents, on a GPU.

With the weights of a token, r = 1 / sqrt(mean(z^2) + eps) and c the cotangent of x,

    z = sum_j read_j H_j,  x = scale r z,  mixed_t = sum_j transport_tj H_j

and backward, with G_t the cotangent of mixed_t, u = scale c and k = r^3 (z . u) / D,

    by_read_j = r (u . H_j) - k (z . H_j),      by_transport_tj = G_t . H_j
    by_H_j    = read_j (r u - k z) + sum_t transport_tj G_t + by_own_j H_j + by_products . columns

Forward is one launch, backward two, with the weights' cotangents between them. Forward moves m rows
a token in and m + 1 out, backward 2 m + 1 in twice and m out. The backward kernels divide the
features, as sums over them are all that they exchange.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from depthjax.kernels.mosaic_gpu import warpgroup as wg
from depthjax.kernels.mosaic_gpu.parts import Divided, Queries, part_of

MOST_FOR_COLUMNS = 64 * 1024
"""Bytes of shared memory that a block gives to columns where fewer features would do."""
PIECE = 8
"""Rows of 128 features of each stream that are mixed at a time."""


def mix(streams, read, transport, scale, eps):
    """(x [T, D], mixed [m, T, D]) of streams [m, T, D], in their dtype.

    read: [m, T], transport: [m, m, T], whose row t is new stream t's, in fp32; scale: [D].
    """
    m, tokens, width = streams.shape
    a_step = m * width * streams.dtype.itemsize
    slots = wg.slots_of(a_step)
    blocks = wg.blocks_of(tokens, slots * a_step, 3, width)
    rows = width // wg.LANES
    pieces = [pl.ds(start, min(PIECE, rows - start)) for start in range(0, rows, PIECE)]

    def body(block, eps_ref, streams_ref, scale_ref, weights_ref, *refs, buffer, arrived):
        x_ref, mixed_ref = refs
        mine = wg.tokens_of(block, blocks, tokens)

        def copy(step, slot):
            token = streams_ref.at[:, block + step * blocks]
            plgpu.copy_gmem_to_smem(token, buffer.at[slot], arrived.at[slot])

        ring = wg.Ring(arrived, slots, copy)
        ring.fill(mine)

        @pl.loop(0, mine)
        def _(k):
            token = block + k * blocks
            weights = [weights_ref[token, i] for i in range(m + m * m)]
            slot = ring.wait(k)
            z = _weighted(weights, [wg.load(buffer.at[slot, j]) for j in range(m)])
            r = lax.rsqrt(jnp.sum(z * z) / width + eps_ref[0])
            wg.store(z * r * wg.load(scale_ref), x_ref.at[token])
            for piece in pieces:
                old = [wg.load(buffer.at[slot, j, piece]) for j in range(m)]
                for t in range(m):
                    new = _weighted(weights[m + t * m :], old)
                    wg.store(new, mixed_ref.at[t, token, piece])
            ring.release(k, mine)

    moved = [(2 * m + 1, streams.dtype)]
    kernel = wg.launch(
        body,
        ("read_streams", wg.cost(tokens, width, moved, 2 * m * (m + 1))),
        blocks,
        (
            wg.row_type(width, streams.dtype, tokens),
            wg.row_type(width, streams.dtype, m, tokens),
        ),
        {
            "buffer": wg.row_buffer(width, streams.dtype, slots, m),
            "arrived": plgpu.Barrier(num_barriers=slots),
        },
    )
    weights = jnp.concatenate([read, transport.reshape(m * m, tokens)]).T
    x, mixed = kernel(
        wg.numbers(eps), wg.split(streams), wg.split(scale.astype(jnp.float32)), weights
    )
    return wg.merge(x), wg.merge(mixed)


def _weighted(weights, rows):
    """sum_j weights_j rows_j over the rows."""
    total = weights[0] * rows[0]
    for weight, row in zip(weights[1:], rows[1:], strict=False):
        total = total + weight * row
    return total


def dots(streams, by_x, by_mixed, read, scale):
    """(u . H_j [m, T], z . H_j [m, T], G_t . H_j [m, m, T]), all fp32.

    by_x: [T, D] and by_mixed: [m, T, D], the cotangents of what `mix` returned.
    """
    m, tokens, width = streams.shape
    divided = Divided(streams, part_of(m, width, arrays=2), 0, 3 * m + 2)
    of = Queries(m, divided.part)

    def body(block, streams_ref, by_x_ref, by_mixed_ref, read_ref, scale_ref, dots_ref):
        i, features, lane, mine = divided.of(block)
        scale = wg.load(scale_ref.at[features], of.of_features)

        @pl.loop(0, mine)
        def _(k):
            token = lane + k * divided.lanes

            def put(n, rows, row):
                wg.store(jnp.sum(rows * of.beside(row), axis=1), dots_ref.at[i, token, n])

            old = of.load(streams_ref.at[:, token, features])
            put(0, old, scale * wg.load(by_x_ref.at[token, features], of.of_features))
            read = of.each(wg.load(read_ref.at[token], of.of_queries))
            put(1, old, jnp.sum(read * old, axis=0))
            new = of.load(by_mixed_ref.at[:, token, features])
            for j in range(m):
                put(2 + j, new, wg.load(streams_ref.at[j, token, features], of.of_features))

    kernel = wg.launch(
        body,
        ("read_streams_dots", wg.cost(tokens, width, [(2 * m + 1, streams.dtype)], 2 * m * m)),
        divided.blocks,
        jax.ShapeDtypeStruct((divided.parts, tokens, m + 2, m), jnp.float32),
        {},
    )
    found = kernel(streams, by_x, by_mixed, read.T, scale.astype(jnp.float32))
    found = jnp.transpose(jnp.sum(found, axis=0), (1, 2, 0))
    return found[0], found[1], jnp.swapaxes(found[2:], 0, 1)


def spread(streams, by_x, by_mixed, weights, scale, columns=None, by_products=None):
    """(by_streams [m, T, D] in their dtype, by_scale [D] fp32).

    weights: (r [T], k [T], read [m, T], by_own [m, T], transport [m, m, T]); columns: [c, D] or
    [c, m, D] with by_products [c, m, T] or [c, T], or None; all fp32.
    """
    m, tokens, width = streams.shape
    count = 0 if columns is None else len(columns)
    own = columns is not None and columns.ndim == 3
    held = count * (m if own else 1)
    part = _part(m, width, held)
    divided = Divided(streams, part, 4 * held * part, 3 * m + 2)
    of = Queries(m, part)

    def body(block, streams_ref, by_x_ref, by_mixed_ref, scale_ref, *refs, **scratch):
        columns_ref, refs = (refs[0], refs[1:]) if count else (None, refs)
        weights_ref, norm_ref, by_streams_ref, by_scale_ref = refs
        _, features, lane, mine = divided.of(block)
        load = of.load if own else lambda ref: wg.load(ref, of.of_features)
        kept = scratch.get("kept")
        if count:

            @pl.loop(0, count)
            def _(n):
                at = columns_ref.at[n, :, features] if own else columns_ref.at[n, features]
                wg.store(load(at), kept.at[n])  # a thread sees its own part

        scale = wg.load(scale_ref.at[features], of.of_features)

        def token(step, by_scale):
            t = lane + step * divided.lanes

            def weight(n):
                return of.each(wg.load(weights_ref.at[t, n], of.of_queries))

            def product(n, by):
                column = load(kept.at[n])
                return by + weight(2 + m + n) * (column if own else of.beside(column))

            r, k = norm_ref[t, 0], norm_ref[t, 1]
            old, read = of.load(streams_ref.at[:, t, features]), weight(0)
            z = jnp.sum(read * old, axis=0)
            c = wg.load(by_x_ref.at[t, features], of.of_features)
            by = read * of.beside(r * (scale * c) - k * z) + weight(1) * old
            for new in range(m):
                row = wg.load(by_mixed_ref.at[new, t, features], of.of_features)
                by = by + weight(2 + new) * of.beside(row)
            by = lax.fori_loop(0, count, product, by) if count else by
            wg.store(by, by_streams_ref.at[:, t, features])
            return by_scale + c * z * r

        by_scale = lax.fori_loop(0, mine, token, of.full_of_features(0))
        wg.store(by_scale, by_scale_ref.at[lane, features])

    moved = [(3 * m + 1, streams.dtype)]
    flops = 2 * m * (m + 3 + count)
    kernel = wg.launch(
        body,
        ("read_streams_spread", wg.cost(tokens, width, moved, flops)),
        divided.blocks,
        (
            jax.ShapeDtypeStruct(streams.shape, streams.dtype),
            jax.ShapeDtypeStruct((divided.lanes, width), jnp.float32),
        ),
        {"kept": plgpu.SMEM((count, *([m] if own else []), part), jnp.float32)} if count else {},
    )
    r, k, read, by_own, transport = weights
    rows = [read[None], by_own[None], transport]
    if count:
        rows.append(by_products if not own else jnp.repeat(by_products[:, None], m, axis=1))
    weights = jnp.transpose(jnp.concatenate(rows), (2, 0, 1))
    operands = [columns] if count else []
    by_streams, by_scale = kernel(
        streams, by_x, by_mixed, scale.astype(jnp.float32), *operands, weights, jnp.stack([r, k], 1)
    )
    return by_streams, jnp.sum(by_scale, axis=0)


def _part(streams: int, width: int, columns: int) -> int:
    """Features of a part of `spread`: few enough for the columns."""
    part = part_of(streams, width, arrays=2)
    pieces = part // wg.LANES
    fitting = [n * wg.LANES for n in range(1, pieces + 1) if pieces % n == 0]
    return max((n for n in fitting if 4 * n * columns <= MOST_FOR_COLUMNS), default=fitting[0])
