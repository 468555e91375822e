"""The first phase of Attention Residuals on a GPU: many queries mix the same finished blocks.

    e_si = u_s . v_i rho_i,  rho_i = 1 / sqrt(mean(v_i^2) + eps),  p_s = softmax_i(e_s)
    z_s  = sum_i p_si v_i

(arXiv 2603.15031, section 4, in the normalised form). All queries are scored against a row at once.
Where they and their mixtures fit into registers, the softmax runs online, and a row is read once.
Else the features are divided: a pass for the products of each part, and one for the mixtures.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from depthjax.kernels.mosaic_gpu import parts
from depthjax.kernels.mosaic_gpu import warpgroup as wg
from depthjax.kernels.mosaic_gpu.mixture import LEAST, TINY, mix
from depthjax.kernels.mosaic_gpu.parts import Parts, Queries, mean_rows, part_of


def phase_one(rows, directions, count, eps):
    """(mixtures [S, T, D] in the rows' dtype, lse [S, T] fp32) of the first `count` (None: all) of
    rows [N, T, D] under directions [S, D], each a query times its key scale. Without a live row
    they are 0 and -inf.

    Moves (count + S) T D numbers where S D is at most 8192, else (2 count + S) T D.
    """
    queries, width = directions.shape
    count = rows.shape[0] if count is None else count
    if queries == 1:
        mixture, lse = mix(rows, count, None, directions[0], eps, None, rows.dtype)
        return mixture[None], lse[None]
    directions = directions.astype(jnp.float32)
    if queries * width <= parts.IN_REGISTERS:
        return _online(rows, count, directions, eps)
    part = part_of(queries, width)
    if part is None:  # too many queries even for the narrowest part
        halves = jnp.split(directions, [queries // 2])
        results = [phase_one(rows, x, count, eps) for x in halves]
        return tuple(jnp.concatenate(x) for x in zip(*results, strict=True))
    found, squares = products(rows, count, directions)
    live = jnp.arange(rows.shape[0]) < count
    rho = lax.rsqrt(squares / width + eps)
    e = jnp.where(live[:, None], found * rho[..., None], -jnp.inf)
    lse = jax.nn.logsumexp(e, axis=1)
    p = jnp.where(e > -jnp.inf, jnp.exp(e - lse[:, None]), 0)
    return _weigh(rows, count, p, part), lse.T


def _online(rows, count, directions, eps):
    queries, width = directions.shape
    tokens = rows.shape[1]
    whole = Parts([rows], width, 2 * queries + 2)
    live = mean_rows(rows)
    moved = [(live + queries, rows.dtype)]
    of = Queries(queries, width)

    def body(block, count_ref, eps_ref, rows_ref, u_ref, *refs, buffers, arrived):
        mixture_ref, lse_ref = refs
        count, eps, (_, _, lane, mine) = count_ref[0], eps_ref[0], whole.of(block)
        ring = whole.ring([rows_ref], block, count, buffers, arrived)
        ring.fill(mine * count)
        u = of.load(u_ref)

        @pl.loop(0, mine)
        def _(k):
            def step(n, state):
                most, weight, z = state
                slot = ring.wait(k * count + n)
                v, square = of.row(buffers[0].at[slot])
                e = jnp.sum(u * v, axis=1) * lax.rsqrt(square / width + eps)
                above = jnp.maximum(most, e)
                keep, p = jnp.exp(most - above), jnp.exp(e - above)
                ring.release(k * count + n, mine * count)
                return above, weight * keep + p, z * of.each(keep) + of.each(p) * v

            start = of.full_of_queries(LEAST), of.full_of_queries(0), of.full(0)
            most, weight, z = lax.fori_loop(0, count, step, start)
            token = lane + k * whole.lanes
            wg.store(most + jnp.log(weight), lse_ref.at[token])
            wg.store(z / of.each(jnp.maximum(weight, TINY)), mixture_ref.at[:, token])

    kernel = wg.launch(
        body,
        ("depth_phase_one", wg.cost(tokens, width, moved, 4 * queries * live)),
        whole.blocks,
        (
            jax.ShapeDtypeStruct((queries, tokens, width), rows.dtype),
            jax.ShapeDtypeStruct((tokens, queries), jnp.float32),
        ),
        whole.scratch,
    )
    mixtures, lse = kernel(wg.integers(count), wg.numbers(eps), rows, directions)
    return mixtures, lse.T


def products(rows, count, directions):
    """(u_s . v_i [T, N, S], |v_i|^2 [T, N]) in fp32; those of dead rows hold anything. directions:
    fp32, so few that `part_of` finds a part."""
    queries, width = directions.shape
    sources, tokens, _ = rows.shape
    part = part_of(queries, width)
    divided = Parts([rows], part, 2 * queries + 2)
    live = count if isinstance(count, int) else mean_rows(rows)
    of = Queries(queries, part)

    def body(block, count_ref, rows_ref, u_ref, products_ref, squares_ref, *, buffers, arrived):
        i, features, lane, mine = divided.of(block)
        count = count_ref[0]
        ring = divided.ring([rows_ref], block, count, buffers, arrived)
        ring.fill(mine * count)
        u = of.load(u_ref.at[:, features])

        @pl.loop(0, mine * count)
        def _(step):
            slot = ring.wait(step)
            n, token = lax.rem(step, count), lane + lax.div(step, count) * divided.lanes
            v, squares_ref[i, token, n] = of.row(buffers[0].at[slot])
            wg.store(jnp.sum(u * v, axis=1), products_ref.at[i, token, n])
            ring.release(step, mine * count)

    shape = divided.parts, tokens, sources
    kernel = wg.launch(
        body,
        ("depth_products", wg.cost(tokens, width, [(live, rows.dtype)], 2 * queries * live)),
        divided.blocks,
        (
            jax.ShapeDtypeStruct((*shape, queries), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        divided.scratch,
    )
    found, squares = kernel(wg.integers(count), rows, directions)
    return jnp.sum(found, axis=0), jnp.sum(squares, axis=0)


def _weigh(rows, count, weights, part):
    """sum_i p_si v_i [S, T, D] with weights p [T, N, S]."""
    queries, (_, tokens, width) = weights.shape[-1], rows.shape
    divided = Parts([rows], part, queries + 2)
    live = mean_rows(rows)
    of = Queries(queries, part)

    def body(block, count_ref, rows_ref, weights_ref, mixture_ref, *, buffers, arrived):
        _, features, lane, mine = divided.of(block)
        count = count_ref[0]
        ring = divided.ring([rows_ref], block, count, buffers, arrived)
        ring.fill(mine * count)

        @pl.loop(0, mine)
        def _(k):
            token = lane + k * divided.lanes

            def step(n, z):
                p = of.each(wg.load(weights_ref.at[token, n], of.of_queries))
                row = wg.load(buffers[0].at[ring.wait(k * count + n)], of.of_features)
                z = z + p * of.beside(row)
                ring.release(k * count + n, mine * count)
                return z

            z = lax.fori_loop(0, count, step, of.full(0))
            wg.store(z, mixture_ref.at[:, token, features])

    out_type = jax.ShapeDtypeStruct((queries, tokens, width), rows.dtype)
    moved = [(live + queries, rows.dtype)]
    call = "depth_weigh", wg.cost(tokens, width, moved, 2 * queries * live)
    kernel = wg.launch(body, call, divided.blocks, out_type, divided.scratch)
    return kernel(wg.integers(count), rows, weights)
