"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp


def at_least_float32(x: jax.Array) -> jax.Array:
    """Promotes bf16 and fp16 to fp32; leaves fp32 and fp64 as they are, so fp64 stays fp64."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def rms_norm(x: jax.Array, scale: jax.Array, eps: float | jax.Array = 1e-6) -> jax.Array:
    """y = scale * x / sqrt(mean(x^2) + eps) over the last axis (Zhang & Sennrich 2019, eq. 4).

    x: [..., D]; scale: [D]; result [..., D] in the dtype of x, computed in at least fp32.
    """
    wide = at_least_float32(x)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * inverse * at_least_float32(scale)).astype(x.dtype)
