"""One softmax over a causal sequence and over entries that each token has to itself."""

import functools

import jax
import jax.numpy as jnp

from depthjax.kernels.flash import flash_attention
from depthjax.kernels.layout import along_sequence


def joint_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    depth_key: jax.Array,
    depth_value: jax.Array,
    count: jax.Array | int,
    implementation: str = "xla",
) -> jax.Array:
    """softmax([q k^T, q d^T] / sqrt(E)) [v, w]: d, w are the token's own keys and values of other
    depths (DepthBench, appendix A).

    query: [B, T, H, E]; key, value: [B, T, K, E], each serving H / K consecutive query heads, seen
    causally; depth_key, depth_value: [N, B, T, K, E], of which the first `count` (0 to N, may be
    traced) are live and the others may hold anything. Result [B, T, H, E]; the softmax is in at
    least fp32.

    The sequence is attended to first: as one more entry beside those over depth, with its
    log-sum-exp as the logit and its mixture as the value, it gives the joint softmax exactly. Holds
    the [B, T, H, N] weights over depth, and of those over the sequence what `flash_attention` does;
    implementation: as there.
    """
    attend = functools.partial(flash_attention, implementation=implementation)
    mixed, lse = along_sequence(attend, query, key, value)
    return join_depth(query, mixed, lse, depth_key, depth_value, count)


def join_depth(
    query: jax.Array,
    mixed: jax.Array,
    lse: jax.Array,
    depth_key: jax.Array,
    depth_value: jax.Array,
    count: jax.Array | int,
) -> jax.Array:
    """The second half of `joint_attention`, from what attention to the sequence gave: its mixture
    [B, T, H, E] and its log-sum-exp [B, T, H], in the dtype that the softmax is in."""
    wide, size = lse.dtype, query.shape[-1]
    live = jnp.arange(len(depth_key)) < count

    def alive(depth):  # [N, B, T, K, 1, E]; sums over it fuse, products of matrices would copy it
        return jnp.where(live[:, None, None, None, None], depth, 0)[..., None, :].astype(wide)

    grouped = query.reshape(*depth_key.shape[1:4], -1, size).astype(wide)  # G heads share a key
    logits = jnp.sum(alive(depth_key) * grouped, -1) * size**-0.5  # [N, B, T, K, G]
    logits = jnp.where(live[:, None, None, None, None], logits, -jnp.inf)
    of_sequence = lse.reshape(1, *grouped.shape[:-1])
    weights = jax.nn.softmax(jnp.concatenate([of_sequence, logits]), axis=0)[..., None]
    total = weights[0] * mixed.reshape(grouped.shape)
    total += jnp.sum(weights[1:] * alive(depth_value), 0)
    return total.reshape(query.shape).astype(query.dtype)
