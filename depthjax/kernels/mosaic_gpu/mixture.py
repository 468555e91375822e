"""Depth mixtures of one query, and their cotangents, on a GPU: a live row is read once forward.

    e_i = u . v_i rho_i,  rho_i = 1 / sqrt(mean(v_i^2) + eps),  p = softmax_i(e),  z = sum_i p_i v_i
    y = z r scale,  r = 1 / sqrt(mean(z^2) + eps)

(arXiv 2603.15031, section 3; u is the query times the key scale). The softmax runs online over
depth: the largest logit, the sum of weights and the mixture so far stay in registers. Backward,
with c the cotangent of z and n_i = rho_i v_i,

    g_i  = p_i (c . v_i - c . z)
    dv_i = p_i c + g_i rho_i (u - n_i e_i / D),     du = sum over tokens and sources of g_i n_i
    c    = r (scale dy - z r mean(dy scale z r)),   dscale = sum over tokens of dy z r

where the rows are read twice: for the mixture of a token, and for their cotangents, by when the L2
cache holds them unless they are many.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from depthjax.kernels.mosaic_gpu import warpgroup as wg

LEAST, TINY = -1e30, 1e-30
"""Below every logit, since -inf would leave inf - inf, and below every sum of weights but that of
no source."""


def mix(rows, count, newest, u, eps, scale=None, dtype=jnp.float32):
    """(mixture [T, D] of `dtype`, lse [T] fp32) over the first `count` of rows [N, T, D] and
    `newest` [T, D], of one dtype.

    count, eps: traced or not; newest: or None, with count >= 1; u: [D] fp32; scale: [D] of an
    RMSNorm on the mixture, or None for none. Moves (count + 2) T D numbers with `newest`.
    """
    _, tokens, width = rows.shape
    slots = wg.slots_of(width * rows.dtype.itemsize)
    blocks = wg.blocks_of(tokens, width * slots * rows.dtype.itemsize, 3, width)
    live = _mean_sources(rows, newest)

    def body(block, count_ref, eps_ref, rows_ref, *refs, buffer, arrived):
        newest_ref, refs = _first(refs, newest is not None)
        scale_ref, (u_ref, mixture_ref, lse_ref) = _first(refs, scale is not None)
        mine = wg.tokens_of(block, blocks, tokens)
        sources = _Sources(rows_ref, newest_ref, count_ref[0])
        steps = mine * sources.total
        u, eps = wg.load(u_ref), eps_ref[0]

        def copy(step, slot):
            n, token = lax.rem(step, sources.total), lax.div(step, sources.total)
            sources.copy(n, block + token * blocks, buffer.at[slot], arrived.at[slot])

        ring = wg.Ring(arrived, slots, copy)
        ring.fill(steps)

        @pl.loop(0, mine)
        def _(k):
            first = k * sources.total
            z, lse = _online(ring, buffer, first, sources.total, steps, u, eps)
            if scale is not None:
                z = z * lax.rsqrt(jnp.sum(z * z) / width + eps) * wg.load(scale_ref)
            lse_ref[block + k * blocks] = lse
            wg.store(z, mixture_ref.at[block + k * blocks])

    kernel = wg.launch(
        body,
        ("depth_mix", wg.cost(tokens, width, [(live, rows.dtype), (1, dtype)], 6 * live)),
        blocks,
        (wg.row_type(width, dtype, tokens), jax.ShapeDtypeStruct((tokens,), jnp.float32)),
        {
            "buffer": wg.row_buffer(width, rows.dtype, slots),
            "arrived": plgpu.Barrier(num_barriers=slots),
        },
    )
    operands = _split(rows, newest, scale, u)
    mixture, lse = kernel(wg.integers(count), wg.numbers(eps), *operands)
    return wg.merge(mixture), lse


def mix_backward(rows, count, newest, u, eps, scale, cotangent, d_rows=None, d_newest=None):
    """(d_rows, d_newest, du [D], d_scale [D]) of `mix` from the cotangent [T, D] of its mixture.

    d_rows: [N, T, D], in any of the dtypes; the rows' cotangents are added to its first `count`
    rows, in place where the caller donates it; None: to zeros. d_newest: [T, D], like `newest`, to
    which its own is added; None: to zeros. du and d_scale (None without a norm): fp32. Moves (3
    count + 4) T D numbers with a `newest` whose cotangent is added, and count more where the cache
    does not hold the rows of the tokens in work.
    """
    d_rows = jnp.zeros_like(rows) if d_rows is None else d_rows
    _, tokens, width = rows.shape
    sizes = rows.dtype.itemsize, d_rows.dtype.itemsize
    slots = wg.slots_of(width * sum(sizes))
    sums = 1 if scale is None else 2
    shared = width * (slots * sum(sizes) + 4 * sums)
    blocks = wg.blocks_of(tokens, shared, 4, width)
    live = _mean_sources(rows, newest)
    moved = [(live, rows.dtype), (1, cotangent.dtype)]
    moved += [(rows.shape[0] + (newest is None), d_rows.dtype)]  # twice the mean count
    moved += [(1, x.dtype) for x in (newest, d_newest) if x is not None]

    def body(block, count_ref, eps_ref, rows_ref, *refs, **scratch):
        newest_ref, refs = _first(refs, newest is not None)
        old_newest_ref, refs = _first(refs, d_newest is not None)
        scale_ref, refs = _first(refs, scale is not None)
        u_ref, c_ref, d_rows_ref, *refs = refs
        d_newest_ref, refs = _first(refs, newest is not None)
        d_scale_ref, (du_ref,) = _first(refs, scale is not None)
        work = _Backward(
            sources=_Sources(rows_ref, newest_ref, count_ref[0]), d_rows=d_rows_ref,
            d_newest=d_newest_ref, old_newest=old_newest_ref, cotangent=c_ref, u=u_ref,
            scale=scale_ref, eps=eps_ref[0], width=width, slots=slots, **scratch,
        )  # fmt: skip
        work.run(block, blocks, tokens)
        wg.store(wg.load(work.sums.at[0]), du_ref.at[block])
        if scale is not None:
            wg.store(wg.load(work.sums.at[1]), d_scale_ref.at[block])

    out_type = [wg.row_type(width, jnp.float32, blocks)] * sums
    if newest is not None:
        out_type.insert(0, wg.row_type(width, newest.dtype, tokens))
    kernel = wg.launch(
        body,
        ("depth_mix_backward", wg.cost(tokens, width, moved, 18 * live)),
        blocks,
        tuple(out_type),
        {
            "buffer": wg.row_buffer(width, rows.dtype, slots),
            "d_buffer": wg.row_buffer(width, d_rows.dtype, slots),
            "sums": wg.row_buffer(width, jnp.float32, sums),
            "arrived": plgpu.Barrier(num_barriers=slots),
            "d_arrived": plgpu.Barrier(num_barriers=slots),
        },
    )
    accumulated = jax.new_ref(wg.split(d_rows))
    operands = _split(rows, newest, d_newest, scale, u, cotangent)
    out = kernel(wg.integers(count), wg.numbers(eps), *operands, accumulated)
    d_newest, (*d_scale, du) = _first(out, newest is not None)
    reduced = [wg.merge(jnp.sum(x, axis=0)) for x in (du, *d_scale)]
    d_newest = None if d_newest is None else wg.merge(d_newest)
    return wg.merge(jax.freeze(accumulated)), d_newest, reduced[0], [*reduced, None][1]


@dataclasses.dataclass(frozen=True)
class _Sources:
    """The live rows of a buffer, and behind them the newest source, if any."""

    rows: Any
    newest: Any
    count: Any

    @property
    def total(self):
        return self.count + (self.newest is not None)

    def copy(self, n, token, slot, barrier) -> None:
        """Starts the copy of source n of a token."""

        def row():
            plgpu.copy_gmem_to_smem(self.rows.at[n, token], slot, barrier)

        if self.newest is None:
            row()
        else:
            pl.when(n < self.count)(row)
            pl.when(n >= self.count)(
                lambda: plgpu.copy_gmem_to_smem(self.newest.at[token], slot, barrier)
            )


@dataclasses.dataclass(frozen=True)
class _Backward:
    """A block's work in `mix_backward`: a token takes `total` steps of the ring for its mixture and
    as many for the cotangents. sums[0]: of du, sums[1]: of d_scale."""

    sources: _Sources
    d_rows: Any
    d_newest: Any
    old_newest: Any
    cotangent: Any
    u: Any
    scale: Any
    eps: Any
    width: int
    slots: int
    buffer: Any
    d_buffer: Any
    sums: Any
    arrived: Any
    d_arrived: Any

    def run(self, block, blocks: int, tokens: int) -> None:
        total, mine = self.sources.total, wg.tokens_of(block, blocks, tokens)
        steps = 2 * mine * total
        u = wg.load(self.u)
        for i in range(self.sums.shape[0]):
            wg.clear(self.sums.at[i])

        def copy(step, slot):
            n, token = lax.rem(step, total), block + lax.div(step, 2 * total) * blocks
            self.sources.copy(n, token, self.buffer.at[slot], self.arrived.at[slot])
            second = lax.rem(step, 2 * total) >= total
            pl.when(second & (n < self.sources.count))(
                lambda: plgpu.copy_gmem_to_smem(
                    self.d_rows.at[n, token], self.d_buffer.at[slot], self.d_arrived.at[slot]
                )
            )

        ring = wg.Ring(self.arrived, self.slots, copy)
        ring.fill(steps)

        @pl.loop(0, mine)
        def _(k):
            first, token = 2 * k * total, block + k * blocks
            z, lse = _online(ring, self.buffer, first, total, steps, u, self.eps)
            c = wg.load(self.cotangent.at[token])
            if self.scale is not None:
                c = self.through_norm(c, z)
            delta = jnp.sum(c * z)
            pl.loop(0, total)(
                lambda n: self.cotangents(ring, first + total, n, steps, token, u, c, lse, delta)
            )

    def through_norm(self, dy, z):
        r = lax.rsqrt(jnp.sum(z * z) / self.width + self.eps)
        unit = z * r
        wg.add(dy * unit, self.sums.at[1])
        dy = dy * wg.load(self.scale)
        return r * (dy - unit * (jnp.sum(dy * unit) / self.width))

    def cotangents(self, ring, first, n, steps, token, u, c, lse, delta) -> None:
        """Source n of a token, whose cotangents are the steps from `first`."""
        slot = ring.wait(first + n)
        v = wg.load(self.buffer.at[slot])
        e, rho = score(v, u, self.eps)
        p = jnp.exp(e - lse)
        g = p * (jnp.sum(c * v) - delta) * rho
        wg.add(g * v, self.sums.at[0])
        dv = p * c + g * (u - (rho * e / self.width) * v)

        def row():
            plgpu.barrier_wait(self.d_arrived.at[slot])
            wg.store(dv + wg.load(self.d_buffer.at[slot]), self.d_rows.at[n, token])

        def own():
            old = 0 if self.old_newest is None else wg.load(self.old_newest.at[token])
            wg.store(dv + old, self.d_newest.at[token])

        if self.d_newest is None:
            row()
        else:
            pl.when(n < self.sources.count)(row)
            pl.when(n >= self.sources.count)(own)
        ring.release(first + n, steps)


def score(v, u, eps):
    """(e, rho) of a source v [D] under a query u [D], in registers."""
    rho = lax.rsqrt(jnp.sum(v * v) / v.size + eps)
    return jnp.sum(v * u) * rho, rho


def _online(ring, buffer, first, total, steps, u, eps):
    """(mixture, lse) of the sources that come at steps first .. first + total - 1 of the ring."""

    def step(n, state):
        most, weight, z = state
        v = wg.load(buffer.at[ring.wait(first + n)])
        e, _ = score(v, u, eps)
        above = jnp.maximum(most, e)
        keep, p = jnp.exp(most - above), jnp.exp(e - above)
        ring.release(first + n, steps)
        return above, weight * keep + p, z * keep + p * v

    start = jnp.float32(LEAST), jnp.float32(0), wg.zeros(buffer.shape[-2] * wg.LANES)
    most, weight, z = lax.fori_loop(0, total, step, start)
    return z / jnp.maximum(weight, TINY), most + jnp.log(weight)


def _mean_sources(rows, newest) -> float:
    """The mean over the counts."""
    return (rows.shape[0] + 1) / 2 if newest is None else rows.shape[0] / 2 + 1


def _first(values, there: bool):
    """(the first value, the others) where it is there, else (None, values)."""
    return (values[0], values[1:]) if there else (None, values)


def _split(rows, *others):
    """Operands in the kernels' form, without those that are None; vectors [D] in fp32."""
    present = [x for x in others if x is not None]
    wide = [x.astype(jnp.float32) if x.ndim == 1 else x for x in present]
    return [wg.split(rows), *map(wg.split, wide)]
