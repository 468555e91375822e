"""The second phase of Attention Residuals on a GPU: one more source joins a finished mixture.

With m the mixture of the completed blocks, whose log-sum-exp is lse, for one query u,

    p = open + branch, or branch where a block begins
    e = u . p rho,  rho = 1 / sqrt(mean(p^2) + eps)
    w = sigmoid(e - lse),  h = m + w (p - m),  x = h r scale,  r = 1 / sqrt(mean(h^2) + eps_out)

(arXiv 2603.15031, section 4; p is rounded to the dtype that it is stored in before it is scored).
Backward, with unit = h r and q the cotangent of x times the scale,

    dh = r (q - unit mean(q unit)),  de = w (1 - w) dh . (p - m)
    dp = w dh + de rho (u - p rho e / D) + what p has from elsewhere,  dm = (1 - w) dh,  dlse = -de
    du = sum over tokens of de rho p,  dscale = sum over tokens of dx unit

Forward moves five rows a token, three in and two out; backward six, or seven with a cotangent of p.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from depthjax.kernels.mosaic_gpu import warpgroup as wg
from depthjax.kernels.mosaic_gpu.mixture import score


def merge(open_sum, branch, fresh, mixture, lse, u, scale, eps):
    """(x, p), both [T, D]: the next branch input, and the open block's sum.

    open_sum, branch: [T, D], with p in the dtype of open_sum; fresh: scalar, traced or not: whether
    a block begins, so that open_sum is not read; mixture: [T, D], with x in its dtype; lse: [T]
    fp32; u, scale: [D]; eps: (of the key norm, of the norm of x).
    """
    tokens, width = branch.shape
    rows = open_sum, branch, mixture
    slots, blocks, scratch = _plan(rows, 0, 4)
    p_dtype, read = open_sum.dtype, [(1, x.dtype) for x in rows]

    def body(block, fresh_ref, eps_ref, *refs, buffers, arrived, open_arrived):
        u_ref, scale_ref, lse_ref, x_ref, p_ref = refs[3:]
        fresh, mine = fresh_ref[0] != 0, wg.tokens_of(block, blocks, tokens)
        stream = _Stream(refs[:3], buffers, open_arrived, fresh)
        ring = stream.ring(block, blocks, arrived, slots)
        ring.fill(mine)
        u = wg.load(u_ref)

        @pl.loop(0, mine)
        def _(k):
            token, slot = block + k * blocks, ring.wait(k)
            p, m = stream.source(slot, p_dtype)
            wg.store(p, p_ref.at[token])
            e, _ = score(p, u, eps_ref[0])
            h = m + _sigmoid(e - lse_ref[token]) * (p - m)
            r = lax.rsqrt(jnp.sum(h * h) / width + eps_ref[1])
            wg.store(h * r * wg.load(scale_ref), x_ref.at[token])
            ring.release(k, mine)

    kernel = wg.launch(
        body,
        ("depth_merge", wg.cost(tokens, width, [*read, (1, mixture.dtype), (1, p_dtype)], 14)),
        blocks,
        (wg.row_type(width, mixture.dtype, tokens), wg.row_type(width, p_dtype, tokens)),
        scratch,
    )
    vectors = u.astype(jnp.float32), scale.astype(jnp.float32)
    x, p = kernel(wg.scalar(fresh), wg.numbers(*eps), *map(wg.split, (*rows, *vectors)), lse)
    return wg.merge(x), wg.merge(p)


def merge_backward(open_sum, branch, fresh, mixture, lse, vectors, eps, cotangents):
    """(dp, d_mixture, d_lse, du, d_scale) of `merge`; vectors: (u, scale); cotangents: (of x, of p
    or None), [T, D].

    dp: [T, D] in the dtype of the branch: the cotangent of the branch and, unless fresh, of
    open_sum; du, d_scale: [D] fp32.
    """
    tokens, width = branch.shape
    rows = [open_sum, branch, mixture, *(c for c in cotangents if c is not None)]
    slots, blocks, scratch = _plan(rows, 2, 4)
    read = [(1, x.dtype) for x in rows]

    def body(block, fresh_ref, eps_ref, *refs, buffers, arrived, open_arrived, sums):
        u_ref, scale_ref, lse_ref, dp_ref, dm_ref, d_lse_ref, du_ref, d_scale_ref = refs[
            len(rows) :
        ]
        fresh, mine = fresh_ref[0] != 0, wg.tokens_of(block, blocks, tokens)
        stream = _Stream(refs[: len(rows)], buffers, open_arrived, fresh)
        ring = stream.ring(block, blocks, arrived, slots)
        ring.fill(mine)
        u = wg.load(u_ref)
        wg.clear(sums.at[0])
        wg.clear(sums.at[1])

        @pl.loop(0, mine)
        def _(k):
            token, slot = block + k * blocks, ring.wait(k)
            p, m = stream.source(slot, open_sum.dtype)
            e, rho = score(p, u, eps_ref[0])
            w, rest = _sigmoid(e - lse_ref[token]), _sigmoid(lse_ref[token] - e)
            h = m + w * (p - m)
            r = lax.rsqrt(jnp.sum(h * h) / width + eps_ref[1])
            dx = wg.load(buffers[3].at[slot])
            wg.add(dx * h * r, sums.at[1])
            q = dx * wg.load(scale_ref)
            dh = r * (q - h * (jnp.sum(q * h) * r * r / width))
            de = w * rest * jnp.sum(dh * (p - m))
            d_lse_ref[token] = -de
            wg.store(rest * dh, dm_ref.at[token])
            wg.add((de * rho) * p, sums.at[0])
            dp = w * dh + (de * rho) * (u - (rho * e / width) * p)
            if cotangents[1] is not None:
                dp = dp + wg.load(buffers[4].at[slot])
            wg.store(dp, dp_ref.at[token])
            ring.release(k, mine)

        wg.store(wg.load(sums.at[0]), du_ref.at[block])
        wg.store(wg.load(sums.at[1]), d_scale_ref.at[block])

    of_block = wg.row_type(width, jnp.float32, blocks)
    kernel = wg.launch(
        body,
        ("depth_merge_backward", wg.cost(tokens, width, [*read, *read[1:3]], 40)),
        blocks,
        (
            wg.row_type(width, branch.dtype, tokens),
            wg.row_type(width, mixture.dtype, tokens),
            jax.ShapeDtypeStruct((tokens,), jnp.float32),
            of_block,
            of_block,
        ),
        scratch,
    )
    wide = (x.astype(jnp.float32) for x in vectors)
    dp, dm, d_lse, *sums = kernel(
        wg.scalar(fresh), wg.numbers(*eps), *map(wg.split, (*rows, *wide)), lse
    )
    return wg.merge(dp), wg.merge(dm), d_lse, *(wg.merge(jnp.sum(x, axis=0)) for x in sums)


def _sigmoid(x):
    """Of a number in a register, where exp overflows to infinity and the quotient is 0."""
    return 1 / (1 + jnp.exp(-x))


def _plan(rows, sums: int, live_rows: int) -> tuple[int, int, dict]:
    """(slots, blocks, shared memory) of a ring that takes a row [D] of each array a step, beside
    `sums` rows of fp32."""
    tokens, width = rows[0].shape
    a_step = width * sum(x.dtype.itemsize for x in rows)
    slots = wg.slots_of(a_step)
    scratch = {
        "buffers": [wg.row_buffer(width, x.dtype, slots) for x in rows],
        "arrived": plgpu.Barrier(num_arrivals=len(rows) - 1, num_barriers=slots),
        "open_arrived": plgpu.Barrier(num_barriers=slots),
    }
    if sums:
        scratch["sums"] = wg.row_buffer(width, jnp.float32, sums)
    shared = slots * a_step + 4 * sums * width
    return slots, wg.blocks_of(tokens, shared, live_rows, width), scratch


@dataclasses.dataclass(frozen=True)
class _Stream:
    """Rows of tokens on their way: of the open sum, unless a block begins, the branch, the mixture
    and whatever else."""

    arrays: Any
    buffers: Any
    open_arrived: Any
    fresh: Any

    def ring(self, block, blocks: int, arrived, slots: int) -> wg.Ring:
        """The ring that takes a token a step."""

        def copy(step, slot):
            def row(i, barriers):
                token = self.arrays[i].at[block + step * blocks]
                plgpu.copy_gmem_to_smem(token, self.buffers[i].at[slot], barriers.at[slot])

            pl.when(~self.fresh)(lambda: row(0, self.open_arrived))
            for i in range(1, len(self.arrays)):
                row(i, arrived)

        return wg.Ring(arrived, slots, copy)

    def source(self, slot, dtype):
        """(p, the mixture) of the token in a slot; p rounded to dtype."""
        so_far = self.buffers[0].at[slot]
        pl.when(~self.fresh)(lambda: plgpu.barrier_wait(self.open_arrived.at[slot]))
        pl.when(self.fresh)(lambda: wg.clear(so_far))
        p = wg.load(self.buffers[1].at[slot]) + wg.load(so_far)
        return p.astype(dtype).astype(jnp.float32), wg.load(self.buffers[2].at[slot])
