"""Cotangents of the first phase of Attention Residuals on a GPU.

With the equations of `queries`, c_s the cotangent of z_s and l_s that of its log-sum-exp,

    g_si = p_si (c_s . v_i - sum_j p_sj c_s . v_j + l_s)
    dv_i = sum_s (p_si c_s + g_si rho_i u_s) - v_i rho_i^2 sum_s g_si e_si / D
    du_s = sum over tokens and i of g_si rho_i v_i

in two passes over parts of the features: one for the products of a row with the queries and with
their cotangents, and one for dv and du. The numbers of a token and source in between are XLA's.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from depthjax.kernels.mosaic_gpu import warpgroup as wg
from depthjax.kernels.mosaic_gpu.parts import Parts, Queries, mean_rows, part_of


def phase_one_backward(rows, c, d_rows, lse, d_lse, directions, count, eps):
    """(d_rows, du [S, D] fp32) of `phase_one`.

    lse: [S, T] fp32, as it returned it; c, d_lse: cotangents of the mixtures [S, T, D] and of the
    lse [S, T] fp32; d_rows: [N, T, D], where the rows' cotangents are added to the first `count`
    rows (None: all), in place where the caller donates it; None: to zeros. Moves (4 count + 2 S)
    T D numbers.
    """
    queries, width = directions.shape
    directions = directions.astype(jnp.float32)
    d_rows = jnp.zeros_like(rows) if d_rows is None else d_rows
    count = rows.shape[0] if count is None else count
    part = part_of(max(2, queries), width, arrays=2)
    if queries == 1:  # a second one, of which nothing depends
        directions, lse, d_lse, c = (
            jnp.concatenate([x, jnp.zeros_like(x)]) for x in (directions, lse, d_lse, c)
        )
    elif part is None:  # too many queries even for the narrowest part
        du, half = [], queries // 2
        for some in (slice(half), slice(half, None)):
            own = lse[some], d_lse[some], directions[some]
            d_rows, own_du = phase_one_backward(rows, c[some], d_rows, *own, count, eps)
            du.append(own_du)
        return d_rows, jnp.concatenate(du)
    by_query, by_cotangent, squares = _products(rows, count, directions, c, part)
    live = (jnp.arange(rows.shape[0]) < count)[:, None]
    rho = lax.rsqrt(jnp.sum(squares, axis=0) / width + eps)[..., None]  # [T, N, 1]
    e = jnp.where(live, jnp.sum(by_query, axis=0) * rho, 0)
    p = jnp.where(live, jnp.exp(e - lse.T[:, None]), 0)
    dots = jnp.where(live, jnp.sum(by_cotangent, axis=0), 0)
    g = p * (dots - jnp.sum(p * dots, axis=1, keepdims=True) + d_lse.T[:, None])
    radial = rho[..., 0] ** 2 * jnp.sum(g * e, axis=-1) / width
    small = p, g * rho, radial
    d_rows, du = _spread(rows, count, directions, c, small, d_rows, part)
    return d_rows, du[:queries]


def _products(rows, count, directions, cotangents, part):
    """(u_s . v_i, c_s . v_i [parts, T, N, S], |v_i|^2 [parts, T, N]) over each part of the
    features; those of dead rows hold anything."""
    queries, width = directions.shape
    sources, tokens, _ = rows.shape
    divided, of = Parts([rows], part, 2 * queries + 2), Queries(queries, part)

    def body(block, count_ref, rows_ref, u_ref, c_ref, *outputs, buffers, arrived):
        by_query_ref, by_cotangent_ref, squares_ref = outputs
        i, features, lane, mine = divided.of(block)
        count = count_ref[0]
        ring = divided.ring([rows_ref], block, count, buffers, arrived)
        ring.fill(mine * count)
        u = of.load(u_ref.at[:, features])

        @pl.loop(0, mine)
        def _(k):
            token = lane + k * divided.lanes
            c = of.load(c_ref.at[:, token, features])

            @pl.loop(0, count)
            def _(n):
                slot = ring.wait(k * count + n)
                v, squares_ref[i, token, n] = of.row(buffers[0].at[slot])
                wg.store(jnp.sum(u * v, axis=1), by_query_ref.at[i, token, n])
                wg.store(jnp.sum(c * v, axis=1), by_cotangent_ref.at[i, token, n])
                ring.release(k * count + n, mine * count)

    shape = divided.parts, tokens, sources
    live = mean_rows(rows)
    moved = [(live, rows.dtype), (queries, cotangents.dtype)]
    kernel = wg.launch(
        body,
        ("depth_phase_one_products", wg.cost(tokens, width, moved, 4 * queries * live)),
        divided.blocks,
        (
            jax.ShapeDtypeStruct((*shape, queries), jnp.float32),
            jax.ShapeDtypeStruct((*shape, queries), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        divided.scratch,
    )
    return kernel(wg.integers(count), rows, directions, cotangents)


def _spread(rows, count, directions, cotangents, small, d_rows, part):
    """(d_rows with dv added, du) from small: (p, g rho [T, N, S], radial [T, N])."""
    queries, width = directions.shape
    tokens = rows.shape[1]
    divided, of = Parts([rows, d_rows], part, 3 * queries + 4), Queries(queries, part)

    def body(block, count_ref, rows_ref, u_ref, c_ref, *refs, buffers, arrived):
        p_ref, g_ref, radial_ref, d_rows_ref, du_ref = refs
        _, features, lane, mine = divided.of(block)
        count = count_ref[0]
        ring = divided.ring([rows_ref, d_rows_ref], block, count, buffers, arrived)
        ring.fill(mine * count)
        u = of.load(u_ref.at[:, features])

        def token(k, du):
            t = lane + k * divided.lanes
            c = of.load(c_ref.at[:, t, features])

            def source(n, du):
                p, g = (of.each(wg.load(x.at[t, n], of.of_queries)) for x in (p_ref, g_ref))
                radial = radial_ref[t, n]
                slot = ring.wait(k * count + n)
                row, before = (wg.load(x.at[slot], of.of_features) for x in buffers)
                dv = jnp.sum(p * c + g * u, axis=0) - radial * row
                wg.store(before + dv, d_rows_ref.at[n, t, features])
                ring.release(k * count + n, mine * count)
                return du + g * of.beside(row)

            return lax.fori_loop(0, count, source, du)

        wg.store(lax.fori_loop(0, mine, token, of.full(0)), du_ref.at[lane, :, features])

    live = mean_rows(rows)
    moved = [(live, rows.dtype), (2 * live, d_rows.dtype), (queries, cotangents.dtype)]
    accumulated = jax.new_ref(d_rows)
    kernel = wg.launch(
        body,
        ("depth_phase_one_spread", wg.cost(tokens, width, moved, 6 * queries * live)),
        divided.blocks,
        jax.ShapeDtypeStruct((divided.lanes, queries, width), jnp.float32),
        divided.scratch,
    )
    du = kernel(wg.integers(count), rows, directions, cotangents, *small, accumulated)
    return jax.freeze(accumulated), jnp.sum(du, axis=0)
