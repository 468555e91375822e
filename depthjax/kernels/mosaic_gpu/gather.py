"""The cotangent of one source, gathered from all its readers, on a GPU.

The equations and the buffer are those of `depthjax.kernels.mixture.gather`. The kernel makes the
pass over the readers' cotangents c_j, each read once: sum_j a_j c_j and c_j . v; the products with
the directions, [T, D] with [D, N], are matrix products, left to XLA.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from depthjax.kernels.mosaic_gpu import warpgroup as wg


def gather(rows, index, last, directions, lse, delta, eps, dtype=jnp.float32):
    """(dv [T, D] of `dtype`, du [N, D] fp32) of source `index`; du: its share in those of all
    readers.

    rows: [N, T, D], the sources 0..index, and behind them in row j + 1 the cotangent of reader j's
    mixture, for j = index..N-2; last: [T, D], that of reader N - 1, in the dtype of the rows;
    directions: [N, D] fp32; lse, delta: [N, T] fp32, of the readers; entries of readers before
    `index` are not used.
    """
    readers, width = rows.shape[0], rows.shape[-1]
    v = lax.dynamic_index_in_dim(rows, index, 0, keepdims=False).astype(jnp.float32)
    rho = lax.rsqrt(jnp.mean(v * v, axis=-1) + eps)
    e = jnp.einsum("td,jd->jt", v, directions, precision="highest") * rho
    reads = (jnp.arange(readers) >= index)[:, None]
    a = jnp.where(reads, jnp.exp(jnp.where(reads, e - lse, 0)), 0)
    dv, dots = weighted_cotangents(rows, index, last, a)
    g = jnp.where(reads, a * (dots - delta), 0)
    along = jnp.einsum("jt,jd->td", g, directions, precision="highest")
    radial = (rho * jnp.sum(g * e, axis=0) / width)[:, None] * v
    du = jnp.einsum("jt,td->jd", g * rho, v, precision="highest")
    return (dv + rho[:, None] * (along - radial)).astype(dtype), du


def weighted_cotangents(rows, index, last, weights):
    """(sum_j a_j c_j [T, D], c_j . v [N, T]), both fp32, over the readers j >= index of source v =
    rows[index], with weights a [N, T]; products of readers before `index` hold anything."""
    readers, tokens, width = rows.shape
    size = rows.dtype.itemsize
    slots = wg.slots_of(width * size)
    blocks = wg.blocks_of(tokens, width * slots * size, 3, width)
    moved = [((readers + 3) / 2, rows.dtype), (1, jnp.float32)]

    def body(
        block, index_ref, rows_ref, last_ref, weights_ref, sum_ref, dots_ref, *, buffer, arrived
    ):
        index, mine = index_ref[0], wg.tokens_of(block, blocks, tokens)
        a_token = readers - index + 1  # the source and its readers
        steps = mine * a_token

        def copy(step, slot):
            n = index + lax.rem(step, a_token)
            token = block + lax.div(step, a_token) * blocks

            def start(source):
                plgpu.copy_gmem_to_smem(source, buffer.at[slot], arrived.at[slot])

            pl.when(n < readers)(lambda: start(rows_ref.at[n, token]))
            pl.when(n >= readers)(lambda: start(last_ref.at[token]))

        ring = wg.Ring(arrived, slots, copy)
        ring.fill(steps)

        @pl.loop(0, mine)
        def _(k):
            token, first = block + k * blocks, k * a_token
            v = wg.load(buffer.at[ring.wait(first)])
            ring.release(first, steps)

            def reader(step, total):
                j = index + step - 1
                a = weights_ref[j, token]  # on its way while the cotangent is waited for
                c = wg.load(buffer.at[ring.wait(first + step)])
                dots_ref[j, token] = jnp.sum(c * v)
                ring.release(first + step, steps)
                return total + a * c

            wg.store(lax.fori_loop(1, a_token, reader, wg.zeros(width)), sum_ref.at[token])

    kernel = wg.launch(
        body,
        ("depth_gather", wg.cost(tokens, width, moved, 2 * readers)),
        blocks,
        (
            wg.row_type(width, jnp.float32, tokens),
            jax.ShapeDtypeStruct((readers, tokens), jnp.float32),
        ),
        {
            "buffer": wg.row_buffer(width, rows.dtype, slots),
            "arrived": plgpu.Barrier(num_barriers=slots),
        },
    )
    total, dots = kernel(wg.integers(index), wg.split(rows), wg.split(last), weights)
    return wg.merge(total), dots
