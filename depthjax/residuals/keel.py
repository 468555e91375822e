"""KEEL: Post-LN with a strongly amplified stream and a norm in front of each branch."""

import dataclasses

import jax.numpy as jnp

from depthjax.kernels import rms_norm
from depthjax.residuals.base import Parameter
from depthjax.residuals.pre_ln import PreLN


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keel(PreLN):
    """KEEL: h <- RMSNorm(alpha h + f(RMSNorm(h))) with alpha = 2 L (DepthBench, appendix A).

    Layer 0 is gentler: its attention adds without alpha and without the outer norm, its MLP without
    alpha. Adds an outer norm scale a sublayer but the first, init 1: (2 L - 1) D parameters.
    """

    name = "keel"
    positive = ("eps", "alpha")
    alpha: float | None = None
    """Factor of the stream from layer 1 on. None: 2 L."""

    def fill_in(self, layers, kv_shape):
        alpha = 2.0 * layers if self.alpha is None else self.alpha
        return dataclasses.replace(self, alpha=alpha)

    def parameters(self, layers, width):
        declared = super().parameters(layers, width)
        attention = {**declared["attention"], "post_norm": Parameter((width,), first_layer=1)}
        mlp = {**declared["mlp"], "post_norm": Parameter((width,))}
        return {**declared, "attention": attention, "mlp": mlp}

    def swap(self, params, i, j):
        """Layer 0 has no outer norm after its attention, and keeps none."""
        swapped, name = super().swap(params, i, j), "post_norm"
        kept = jnp.where((i == 0) | (j == 0), params["attention"][name], swapped["attention"][name])
        return {**swapped, "attention": {**swapped["attention"], name: kept}}

    def write(self, params, carry, y, aux, s):
        total = jnp.where(s < 2, carry, (self.alpha * carry).astype(carry.dtype)) + y
        return jnp.where(s == 0, total, rms_norm(total, params["post_norm"], self.eps)), None
