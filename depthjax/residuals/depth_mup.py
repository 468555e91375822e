"""Depth-muP: Pre-LN whose branches, and what the optimizer does to them, shrink with depth."""

import dataclasses
from typing import ClassVar

from depthjax.residuals.base import UpdateScale
from depthjax.residuals.pre_ln import PreLN


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthMuP(PreLN):
    """Depth-muP: h <- h + m_L^-a f(RMSNorm(h)) with m_L = L / base_layers and a = 1/2 (Yang et al.
    2023; DepthBench's code).

    The optimizer follows: parameters of the blocks get learning rate m_L^(a - 1) and Adam epsilon
    m_L^-a. With `base_width`, and m_N = D / base_width, width is transferred as well: matrices of
    the blocks start with m_N^(-1/2), and get learning rate m_N^-1 m_L^(a - 1) and decay m_N; the
    epsilons of blocks, embedding and head get another m_N^-1, and so does the output of the head
    (here: its input). Parameters and state as Pre-LN.
    """

    name = "depth_mup"
    positive = ("eps", "base_layers", "base_width", "branch_scale")
    exponent: ClassVar[float] = 0.5
    """a: how fast branches shrink with depth."""
    base_layers: int = 24
    """Depth whose hyperparameters are transferred."""
    base_width: int | None = None
    """Width whose hyperparameters are transferred (DepthBench: 1024). None: depth alone."""
    branch_scale: float | None = None
    """Factor of branch outputs. None: (L / base_layers)^-a."""

    def fill_in(self, layers, kv_shape):
        scale = self.branch_scale
        if scale is None:
            scale = (layers / self.base_layers) ** -self.exponent
        return dataclasses.replace(self, branch_scale=scale)

    def _width_ratio(self, width: int) -> float:
        return width / (self.base_width or width)

    def init_scales(self, layers, width):
        if self.base_width is None:
            return {}
        matrices = ("attention/query", "attention/key", "attention/value", "attention/out")
        matrices += ("mlp/gate", "mlp/up", "mlp/down")
        return dict.fromkeys(matrices, self._width_ratio(width) ** -0.5)

    def update_scales(self, layers, width):
        deep, wide = layers / self.base_layers, self._width_ratio(width)
        rate, eps = deep ** (self.exponent - 1), deep**-self.exponent / wide
        matrices, norms = UpdateScale(rate / wide, eps, wide), UpdateScale(rate, eps)
        groups = {"attention/*": matrices, "mlp/*": matrices}
        groups |= {"residual/attention/*": norms, "residual/mlp/*": norms}
        return groups | dict.fromkeys(("embedding", "head"), UpdateScale(eps=1 / wide))

    def write(self, params, carry, y, aux, s):
        return carry + (self.branch_scale * y).astype(y.dtype), None

    def finish(self, params, carry, history):
        x = super().finish(params, carry, history)
        return (x / self._width_ratio(x.shape[-1])).astype(x.dtype)
