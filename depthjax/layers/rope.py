"""Rotary position embedding."""

import jax
import jax.numpy as jnp

from depthjax.kernels.rms_norm import at_least_float32


def rope(x: jax.Array, theta: float = 10_000.0, start: jax.Array | None = None) -> jax.Array:
    """Rotates pairs (x_j, x_{j + E/2}) by position * theta^(-2j/E) (Su et al. 2021; the rotate-half
    layout of LLaMA).

    x: [B, T, H, E] with positions 0..T-1, or from start [B] on; same shape and dtype back; computed
    in at least fp32.
    """
    length, size = x.shape[1], x.shape[-1]
    wide = at_least_float32(x)
    frequency = theta ** (-jnp.arange(0, size, 2, dtype=wide.dtype) / size)
    position = jnp.arange(length, dtype=wide.dtype)
    if start is not None:
        position = start[:, None].astype(wide.dtype) + position
    angle = position[..., None] * frequency  # [T, E/2] or [B, T, E/2]
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]  # [..., T, 1, E/2]
    low, high = jnp.split(wide, 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1).astype(x.dtype)
