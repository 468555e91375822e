"""Causal multi-head and grouped-query self-attention with rotary positions."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from depthjax.layers.init import truncated_normal
from depthjax.layers.rope import rope


def _implementation(dtype: Any, head_dim: int) -> str:
    """cuDNN's flash attention where it applies (GPU, 16-bit, head size 8 n <= 128), else XLA."""
    fits = jnp.dtype(dtype).itemsize == 2 and head_dim % 8 == 0 and head_dim <= 128
    return "cudnn" if fits and jax.default_backend() == "gpu" else "xla"


class Attention(nnx.Module):
    """softmax(q k^T / sqrt(E)) v under a causal mask; no biases, no QK-norm, no document mask.

    x [B, T, D] -> y [B, T, D]. H query heads of size E, K key-value heads, each serving H / K
    consecutive query heads. Init: truncated normal of `init_std`. Matrices are cast to the dtype of
    x for the products; the softmax is in at least fp32. DepthBench, section "shared backbone".
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        rope_theta: float = 10_000.0,
        init_std: float = 0.02,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        init = truncated_normal(init_std)

        def matrix(*shape: int) -> nnx.Param:
            return nnx.Param(init(rngs.params(), shape, param_dtype), decay="matrix")

        self.query = matrix(width, heads, head_dim)
        self.key = matrix(width, kv_heads, head_dim)
        self.value = matrix(width, kv_heads, head_dim)
        self.out = matrix(heads, head_dim, width)
        self.rope_theta = rope_theta

    def __call__(self, x: jax.Array, ctx: None = None):
        """x: [B, T, D]. Returns (y [B, T, D], aux = (key, value) before rotation [B, T, K, E]).

        ctx: depth keys and values for variants whose attention reads over depth; none takes any
        yet.
        """
        if ctx is not None:
            raise ValueError("this attention takes no depth context")

        def project(matrix: nnx.Param) -> jax.Array:
            return jnp.einsum("btd,dhe->bthe", x, matrix[...].astype(x.dtype))

        query, key, value = project(self.query), project(self.key), project(self.value)
        mixed = jax.nn.dot_product_attention(
            rope(query, self.rope_theta),
            rope(key, self.rope_theta),
            value,
            is_causal=True,
            implementation=_implementation(x.dtype, query.shape[-1]),
        )
        y = jnp.einsum("bthe,hed->btd", mixed, self.out[...].astype(x.dtype))
        return y, (key, value)
