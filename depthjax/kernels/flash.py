"""Causal attention with its log-sum-exp, never holding the weights of all pairs."""

import functools

import jax
import jax.numpy as jnp

from depthjax.kernels import splash

BLOCK = 512
"""Keys that are weighed at a time; also the most at which all of them are."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def flash_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, implementation: str = "xla"
) -> tuple[jax.Array, jax.Array]:
    """softmax(q k^T / sqrt(E)) v under a causal mask, and the logarithm of the softmax's
    denominator; both can be differentiated (once).

    query: [B, T, H, E]; key, value: [B, T, K, E], each serving H / K consecutive query heads.
    Returns (mixed [B, T, H, E], log-sum-exp fp32 or wider [B, T, H]). The backward pass recomputes
    the weights from the log-sum-exp (Dao et al. 2022); a cotangent d of the log-sum-exp enters as
    dS = P * (dP - sum(dO * O) + d).

    implementation: "xla", a scan over blocks of keys, or "splash", the TPU kernel (see
    `splash.fits`).
    """
    return _forward(query, key, value, implementation)[0]


def _forward(query, key, value, implementation):
    forward = {"xla": _xla_forward, "splash": splash.forward}[implementation]
    mixed, lse = forward(query, key, value)
    return (mixed, lse), (query, key, value, mixed, lse)


def _backward(implementation, kept, cotangents):
    *_, mixed, lse = kept
    by_mixed, by_lse = cotangents
    shift = jnp.einsum("bthe,bthe->bth", mixed, by_mixed, preferred_element_type=lse.dtype)
    backward = {"xla": _xla_backward, "splash": splash.backward}[implementation]
    return backward(*kept[:3], lse, by_mixed, shift - by_lse)


flash_attention.defvjp(_forward, _backward)


def _blocks(x):
    """[B, T, ...] -> [blocks, B, BLOCK, ...]; what is added lies behind every query."""
    length = x.shape[1]
    size = min(length, BLOCK)
    pad = [(0, 0)] * x.ndim
    pad[1] = (0, -length % size)
    x = jnp.pad(x, pad) if pad[1][1] else x
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _grouped(x, heads):
    """[B, T, H, ...] -> [B, T, K, G, ...]."""
    return x.reshape(*x.shape[:2], heads, -1, *x.shape[3:])


def _logits(query, key, block, wide):
    """[B, K, G, T, BLOCK] of grouped queries with one block of keys, -inf above the diagonal."""
    logits = jnp.einsum("btkge,bske->bkgts", query, key, preferred_element_type=wide)
    position = block * key.shape[1] + jnp.arange(key.shape[1])
    seen = position <= jnp.arange(query.shape[1])[:, None]
    return jnp.where(seen, logits * query.shape[-1] ** -0.5, -jnp.inf)


def absorb(carry: tuple, logits: jax.Array, value: jax.Array) -> tuple:
    """Takes more keys into a softmax that goes through them in pieces.

    carry: (largest logit so far [B, K, G, T], sum of the weights relative to it, weighted sum of
    the values [..., E]); logits: [B, K, G, T, S]; value: [B, S, K, E].
    """
    most, total, mixed = carry
    new = jnp.maximum(most, logits.max(-1))
    weights, old = jnp.exp(logits - new[..., None]), jnp.exp(most - new)
    total = total * old + weights.sum(-1)
    product = jnp.einsum(
        "bkgts,bske->bkgte",
        weights.astype(value.dtype),
        value,
        preferred_element_type=logits.dtype,
    )
    return new, total, mixed * old[..., None] + product


def _xla_forward(query, key, value):
    wide = jnp.promote_types(query.dtype, jnp.float32)
    grouped = _grouped(query, key.shape[2])

    def step(carry, inputs):
        key, value, block = inputs
        return absorb(carry, _logits(grouped, key, block, wide), value), None

    keys, values = _blocks(key), _blocks(value)
    zero = jnp.zeros_like(jnp.moveaxis(grouped, 1, 3), dtype=wide)  # [B, K, G, T, E]
    start = jnp.full_like(zero[..., 0], -jnp.inf), zero[..., 0], zero
    inputs = keys, values, jnp.arange(len(keys))
    (most, total, mixed), _ = jax.lax.scan(step, start, inputs)
    mixed = jnp.moveaxis(mixed / total[..., None], 3, 1).reshape(query.shape)
    lse = jnp.moveaxis(most + jnp.log(total), 3, 1).reshape(query.shape[:-1])
    return mixed.astype(query.dtype), lse


def _xla_backward(query, key, value, lse, by_mixed, shift):
    """shift: sum(dO * O) - d, [B, T, H]."""
    wide, heads, length = lse.dtype, key.shape[2], key.shape[1]
    grouped, by_mixed = _grouped(query, heads), _grouped(by_mixed, heads)
    lse, shift = (jnp.moveaxis(_grouped(x, heads), 1, 3)[..., None] for x in (lse, shift))
    product = functools.partial(jnp.einsum, preferred_element_type=wide)

    def step(by_query, inputs):
        key, value, block = inputs
        weights = jnp.exp(_logits(grouped, key, block, wide) - lse)
        by_weights = product("btkge,bske->bkgts", by_mixed, value)
        by_logits = weights * (by_weights - shift) * query.shape[-1] ** -0.5
        weights, by_logits = weights.astype(value.dtype), by_logits.astype(value.dtype)
        by_query += product("bkgts,bske->btkge", by_logits, key)
        by_key = product("bkgts,btkge->bske", by_logits, grouped)
        by_value = product("bkgts,btkge->bske", weights, by_mixed)
        return by_query, (by_key.astype(key.dtype), by_value.astype(value.dtype))

    keys, values = _blocks(key), _blocks(value)
    start = jnp.zeros_like(grouped, dtype=wide)
    inputs = keys, values, jnp.arange(len(keys))
    by_query, blocks = jax.lax.scan(step, start, inputs)

    def join(x):
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :length]

    return by_query.reshape(query.shape).astype(query.dtype), *map(join, blocks)
