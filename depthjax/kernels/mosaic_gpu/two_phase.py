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

Forward moves five rows a token, three in and two out, of which one less in where a block begins;
backward six.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from depthjax.kernels.mosaic_gpu import warpgroup as wg
from depthjax.kernels.mosaic_gpu.mixture import score


def merge(mixtures, place, open_sum, branch, lse, u, scale, fresh, eps):
    """(x, p), both [T, D]: the next branch input, and the open block's sum.

    mixtures: [S, T, D], of which that at `place`, traced or not, is taken, with x in its dtype;
    open_sum, branch: [T, D], with p in the dtype of open_sum; branch None: p is open_sum; lse: [T]
    fp32; u, scale: [D]; fresh: None or a scalar, traced or not: whether a block begins, so that
    open_sum is not read; eps: (of the key norm, of the norm of x).
    """
    tokens, width = open_sum.shape
    branch, fresh = (open_sum, True) if branch is None else (branch, fresh)
    rows = open_sum, branch, mixtures
    slots, blocks, scratch = _plan(tokens, rows, sums=0)
    scratch["open_arrived"] = plgpu.Barrier(num_barriers=slots)
    scratch["arrived"] = plgpu.Barrier(num_arrivals=2, num_barriers=slots)
    out_dtypes = mixtures.dtype, open_sum.dtype
    moved = [(1, dtype) for dtype in (*(x.dtype for x in rows), *out_dtypes)]

    def body(block, integers_ref, eps_ref, *refs, buffers, arrived, open_arrived):
        open_ref, branch_ref, mixtures_ref, u_ref, scale_ref, lse_ref, x_ref, p_ref = refs
        fresh, place = integers_ref[0] != 0, integers_ref[1]
        mine = wg.tokens_of(block, blocks, tokens)
        so_far, added, mixed = buffers

        def copy(step, slot):
            token = block + step * blocks
            pl.when(~fresh)(
                lambda: plgpu.copy_gmem_to_smem(
                    open_ref.at[token], so_far.at[slot], open_arrived.at[slot]
                )
            )
            plgpu.copy_gmem_to_smem(branch_ref.at[token], added.at[slot], arrived.at[slot])
            mixture = mixtures_ref.at[place, token]
            plgpu.copy_gmem_to_smem(mixture, mixed.at[slot], arrived.at[slot])

        ring = wg.Ring(arrived, slots, copy)
        ring.fill(mine)
        u = wg.load(u_ref)

        @pl.loop(0, mine)
        def _(k):
            token, slot = block + k * blocks, ring.wait(k)
            pl.when(~fresh)(lambda: plgpu.barrier_wait(open_arrived.at[slot]))
            pl.when(fresh)(lambda: wg.clear(so_far.at[slot]))
            p = wg.load(added.at[slot]) + wg.load(so_far.at[slot])
            p = p.astype(open_sum.dtype).astype(jnp.float32)
            wg.store(p, p_ref.at[token])
            m, (e, _) = wg.load(mixed.at[slot]), score(p, u, eps_ref[0])
            h = m + _sigmoid(e - lse_ref[token]) * (p - m)
            r = lax.rsqrt(jnp.sum(h * h) / width + eps_ref[1])
            wg.store(h * r * wg.load(scale_ref), x_ref.at[token])
            ring.release(k, mine)

    kernel = wg.launch(
        body,
        ("depth_merge", wg.cost(tokens, width, moved, 14)),
        blocks,
        tuple(wg.row_type(width, dtype, tokens) for dtype in out_dtypes),
        scratch,
    )
    vectors = u.astype(jnp.float32), scale.astype(jnp.float32)
    scalars = wg.integers(False if fresh is None else fresh, place), wg.numbers(*eps)
    x, p = kernel(*scalars, *map(wg.split, (*rows, *vectors)), lse)
    return wg.merge(x), wg.merge(p)


def merge_backward(mixture, p, d_x, d_p, lse, u, scale, eps):
    """(d_mixture, dp, d_lse, du, d_scale) of `merge` from p, as it returned it, and the cotangents
    of its results, [T, D].

    d_mixture, dp: [T, D] in the dtypes of the mixture and of p; d_lse: [T] fp32; du, d_scale: [D]
    fp32. dp is the cotangent of the branch and, unless fresh, of the open sum.
    """
    tokens, width = p.shape
    rows = mixture, p, d_x, d_p
    slots, blocks, scratch = _plan(tokens, rows, sums=2)
    scratch["arrived"] = plgpu.Barrier(num_arrivals=len(rows), num_barriers=slots)
    moved = [(1, x.dtype) for x in (*rows, mixture, p)]

    def body(block, eps_ref, *refs, buffers, arrived, sums):
        u_ref, scale_ref, lse_ref, dm_ref, dp_ref, d_lse_ref, du_ref, d_scale_ref = refs[4:]
        mine = wg.tokens_of(block, blocks, tokens)

        def copy(step, slot):
            for array, buffer in zip(refs, buffers, strict=False):
                row = array.at[block + step * blocks]
                plgpu.copy_gmem_to_smem(row, buffer.at[slot], arrived.at[slot])

        ring = wg.Ring(arrived, slots, copy)
        ring.fill(mine)
        u = wg.load(u_ref)
        wg.clear(sums.at[0])
        wg.clear(sums.at[1])

        @pl.loop(0, mine)
        def _(k):
            token, slot = block + k * blocks, ring.wait(k)
            m, p = wg.load(buffers[0].at[slot]), wg.load(buffers[1].at[slot])
            e, rho = score(p, u, eps_ref[0])
            w, rest = _sigmoid(e - lse_ref[token]), _sigmoid(lse_ref[token] - e)
            h = m + w * (p - m)
            r = lax.rsqrt(jnp.sum(h * h) / width + eps_ref[1])
            dx = wg.load(buffers[2].at[slot])
            wg.add(dx * h * r, sums.at[1])
            q = dx * wg.load(scale_ref)
            dh = r * (q - h * (jnp.sum(q * h) * r * r / width))
            de = w * rest * jnp.sum(dh * (p - m))
            d_lse_ref[token] = -de
            wg.store(rest * dh, dm_ref.at[token])
            wg.add((de * rho) * p, sums.at[0])
            dp = w * dh + (de * rho) * (u - (rho * e / width) * p)
            wg.store(dp + wg.load(buffers[3].at[slot]), dp_ref.at[token])
            ring.release(k, mine)

        wg.store(wg.load(sums.at[0]), du_ref.at[block])
        wg.store(wg.load(sums.at[1]), d_scale_ref.at[block])

    of_block = wg.row_type(width, jnp.float32, blocks)
    kernel = wg.launch(
        body,
        ("depth_merge_backward", wg.cost(tokens, width, moved, 40)),
        blocks,
        (
            wg.row_type(width, mixture.dtype, tokens),
            wg.row_type(width, p.dtype, tokens),
            jax.ShapeDtypeStruct((tokens,), jnp.float32),
            of_block,
            of_block,
        ),
        scratch,
    )
    operands = *rows, u.astype(jnp.float32), scale.astype(jnp.float32)
    dm, dp, d_lse, *sums = kernel(wg.numbers(*eps), *map(wg.split, operands), lse)
    return wg.merge(dm), wg.merge(dp), d_lse, *(wg.merge(jnp.sum(x, axis=0)) for x in sums)


def _sigmoid(x):
    """Of a number in a register, where exp overflows to infinity and the quotient is 0."""
    return 1 / (1 + jnp.exp(-x))


def _plan(tokens: int, rows, sums: int) -> tuple[int, int, dict]:
    """(slots, blocks, shared memory) of a ring that takes a row [D] of each array a step, beside
    `sums` rows of fp32."""
    width = rows[0].shape[-1]
    a_step = width * sum(x.dtype.itemsize for x in rows)
    slots = wg.slots_of(a_step)
    scratch = {"buffers": [wg.row_buffer(width, x.dtype, slots) for x in rows]}
    if sums:
        scratch["sums"] = wg.row_buffer(width, jnp.float32, sums)
    shared = slots * a_step + 4 * sums * width
    return slots, wg.blocks_of(tokens, shared, 4, width), scratch
