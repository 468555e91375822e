"""Layer normalisation."""

import jax
import jax.numpy as jnp

from depthjax.kernels.rms_norm import at_least_float32


def layer_norm(x: jax.Array, scale: jax.Array, eps: float | jax.Array = 1e-6) -> jax.Array:
    """y = scale * (x - mean(x)) / sqrt(var(x) + eps) over the last axis, without a bias (Ba et al.
    2016).

    x: [..., D]; scale: [D]; result [..., D] in the dtype of x, computed in at least fp32.
    """
    wide = at_least_float32(x)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (centred * inverse * at_least_float32(scale)).astype(x.dtype)
