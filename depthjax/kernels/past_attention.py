"""Attention of new tokens to themselves and to the tokens before them, out of a cache."""

import jax
import jax.numpy as jnp

from depthjax.kernels.flash import BLOCK, absorb, flash_attention


def past_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    past: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """softmax([q p^T, q k^T] / sqrt(E)) [w, v]: k, v are the keys and values of the new tokens,
    seen causally, p, w those of the tokens before them, all of which are seen.

    query: [B, T, H, E]; key, value: [B, T, K, E], each serving H / K consecutive query heads; past:
    (keys [B, S, K, E], values alike, live bool [B, S], used int32 []): slots that are not live are
    not seen (but hold finite numbers), and none is from `used` on. Returns (mixed [B, T, H, E],
    log-sum-exp fp32 or wider [B, T, H]), as `flash_attention`, which the new tokens are mixed with
    first; implementation: as there.

    One new token weighs all slots at once, several a block of them at a time, and no block that is
    empty. Not for differentiation.
    """
    past_key, past_value, live, used = past
    mixed, lse = flash_attention(query, key, value, implementation)
    wide, (batch, length, heads), size = lse.dtype, key.shape[:3], query.shape[-1]

    def grouped(x):  # [B, T, H, ...] -> [B, K, G, T, ...]
        return jnp.moveaxis(x.reshape(batch, length, heads, -1, *x.shape[3:]), 1, 3)

    def back(x):
        return jnp.moveaxis(x, 3, 1).reshape(batch, length, -1, *x.shape[4:])

    queries, slots = grouped(query), live.shape[1]
    block = slots if length == 1 else min(slots, BLOCK)

    def step(number, carry):
        # The last block reaches back where it would reach beyond the end.
        first = jnp.minimum(number * block, slots - block)
        k, v, seen = (
            jax.lax.dynamic_slice_in_dim(x, first, block, 1) if block < slots else x
            for x in (past_key, past_value, live)
        )
        seen &= first + jnp.arange(block) >= number * block
        logits = jnp.einsum("bkgte,bske->bkgts", queries, k, preferred_element_type=wide)
        logits = jnp.where(seen[:, None, None, None], logits * size**-0.5, -jnp.inf)
        return absorb(carry, logits, v)

    most = grouped(lse)
    carry = most, jnp.ones_like(most), grouped(mixed).astype(wide)
    if block == slots:
        carry = step(0, carry)
    else:
        carry = jax.lax.fori_loop(0, -(-used // block), step, carry)
    most, total, mixed = carry
    return back(mixed / total[..., None]).astype(query.dtype), back(most + jnp.log(total))
