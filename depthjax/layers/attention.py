"""Causal multi-head and grouped-query self-attention with rotary positions."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from depthjax.kernels import splash
from depthjax.kernels.flash import flash_attention
from depthjax.kernels.joint_attention import join_depth, joint_attention
from depthjax.kernels.layout import along_sequence, head_tokens
from depthjax.kernels.over_mesh import platform
from depthjax.kernels.past_attention import past_attention
from depthjax.layers.init import truncated_normal
from depthjax.layers.rope import rope
from depthjax.layers.tokens import merge_tokens

IMPLEMENTATIONS = ("xla", "splash", "cudnn")


def _implementation(dtype: Any, length: int, head_dim: int) -> str:
    """The flash attention of the platform where it applies (TPU: splash; GPU: cuDNN's, of 16 bits
    and head size 8 n <= 128), else XLA; also for a GPU that is only compiled for, where cuDNN,
    which would have to be there, is not."""
    where = platform()
    if where == "tpu" and splash.fits(dtype, length):
        return "splash"
    fits = jnp.dtype(dtype).itemsize == 2 and head_dim % 8 == 0 and head_dim <= 128
    return "cudnn" if fits and where == jax.default_backend() == "gpu" else "xla"


def causal_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, implementation: str | None = None
) -> jax.Array:
    """softmax(q k^T / sqrt(E)) v under a causal mask: query [B, T, H, E], key and value
    [B, T, K, E] -> [B, T, H, E]; implementation as in `Attention`."""
    if implementation is None:
        implementation = _implementation(query.dtype, query.shape[1], query.shape[-1])
    if query.dtype == jnp.float64:  # whose logits JAX's own attention rounds to fp32
        return flash_attention(query, key, value, "xla")[0]
    if implementation == "splash":
        return flash_attention(query, key, value, "splash")[0]
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=True, implementation=implementation
    )


class Cache(NamedTuple):
    """What attention remembers of tokens that are over, in slots of which any may be empty."""

    key: jax.Array
    """[B, S, K, E], rotated; of a stack of layers [L, B, S, K, E]."""
    value: jax.Array
    """As the keys."""
    live: jax.Array
    """bool [B, S]: which slots hold a token."""
    length: jax.Array
    """int32 [B]: tokens so far, which is the position of the next one."""
    used: jax.Array
    """int32 []: the slots from here on are empty in all rows."""


class Attention(nnx.Module):
    """softmax(q k^T / sqrt(E)) v under a causal mask; no biases, no QK-norm, no document mask.

    x [B, T, D] -> y [B, T, D]. H query heads of size E, K key-value heads, each serving H / K
    consecutive query heads. Init: truncated normal of `init_std`. Matrices are cast to the dtype of
    x for the products; the softmax is in at least fp32. DepthBench, section 2.
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
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        if implementation not in (None, *IMPLEMENTATIONS):
            raise ValueError(
                f"implementation is {implementation!r}: choose from {', '.join(IMPLEMENTATIONS)}, "
                "or None"
            )
        init = truncated_normal(init_std)

        def matrix(**axes: int) -> nnx.Param:
            value = init(rngs.params(), tuple(axes.values()), param_dtype)
            return nnx.Param(value, decay="matrix", axes=tuple(axes))

        self.query = matrix(width=width, heads=heads, size=head_dim)
        self.key = matrix(width=width, heads=kv_heads, size=head_dim)
        self.value = matrix(width=width, heads=kv_heads, size=head_dim)
        self.out = matrix(heads=heads, size=head_dim, width=width)
        self.rope_theta, self.implementation = rope_theta, implementation

    def __call__(self, x: jax.Array, ctx=None, past: Cache | None = None):
        """x: [B, T, D]. Returns (y [B, T, D], aux = (key, value) before rotation [B, T, K, E]).

        ctx: for residual connections whose attention reads over depth as well, (keys [N, B, T, K,
        E] without rotation, values alike, count): the first `count` of the N entries of a token
        join the sequence in its softmax. past: of tokens before those of x, which see them all.
        """

        tokens = merge_tokens(x)

        def project(matrix: nnx.Param) -> jax.Array:
            y = jnp.einsum("...d,dhe->...he", tokens, matrix[...].astype(x.dtype))
            return head_tokens(y.reshape(*x.shape[:2], *y.shape[-2:]))

        query, key, value = project(self.query), project(self.key), project(self.value)
        start = None if past is None else past.length
        query, rotated = (rope(x, self.rope_theta, start) for x in (query, key))
        if ctx is None and past is None:
            attend = functools.partial(causal_attention, implementation=self.implementation)
            mixed = along_sequence(attend, query, rotated, value)
        else:
            name = self.implementation or _implementation(x.dtype, *query.shape[1::2])
            name = "xla" if name == "cudnn" else name  # which keeps its log-sum-exp to itself
            if past is None:
                mixed = joint_attention(query, rotated, value, *ctx, implementation=name)
            else:
                before = past.key, past.value, past.live, past.used
                mixed, lse = past_attention(query, rotated, value, before, implementation=name)
                mixed = mixed if ctx is None else join_depth(query, mixed, lse, *ctx)
        y = jnp.einsum("...he,hed->...d", merge_tokens(mixed), self.out[...].astype(x.dtype))
        return y.reshape(x.shape), (key, value)
