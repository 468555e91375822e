"""The gated MLP."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from depthjax.layers.init import truncated_normal
from depthjax.layers.tokens import merge_tokens


class SwiGLU(nnx.Module):
    """y = down(silu(gate x) * up x) (Shazeer 2020), no biases.

    x [..., D] -> y [..., D], inner width F. Init: truncated normal of `init_std`.
    """

    def __init__(
        self,
        width: int,
        inner: int,
        *,
        init_std: float = 0.02,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        init = truncated_normal(init_std)

        def matrix(**axes: int) -> nnx.Param:
            value = init(rngs.params(), tuple(axes.values()), param_dtype)
            return nnx.Param(value, decay="matrix", axes=tuple(axes))

        self.gate = matrix(width=width, columns=inner)
        self.up = matrix(width=width, columns=inner)
        self.down = matrix(columns=inner, width=width)

    def __call__(self, x: jax.Array, ctx: None = None):
        """x: [..., D]. Returns (y [..., D], None): an MLP keeps nothing for later depth."""
        tokens = merge_tokens(x)
        hidden = jax.nn.silu(tokens @ self.gate[...].astype(x.dtype)) * (
            tokens @ self.up[...].astype(x.dtype)
        )
        return (hidden @ self.down[...].astype(x.dtype)).reshape(x.shape), None
