"""LayerNorm Scaling: Pre-LN whose branch inputs shrink with depth."""

import dataclasses

import numpy as np

from depthjax.residuals.base import KINDS
from depthjax.residuals.pre_ln import PreLN


@dataclasses.dataclass(frozen=True, kw_only=True)
class LNS(PreLN):
    """LayerNorm Scaling: h <- h + f(c_l RMSNorm(h)) with c_l = 1 / sqrt(l + 1) for layer l = 0, 1,
    ... (Sun et al. 2025; DepthBench, appendix A).

    No parameters beyond Pre-LN. c_l belongs to a layer's weights: swapping layers moves it along.
    The final norm is not scaled.
    """

    name = "lns"
    peak_lr = 1e-2
    constant: bool = False
    """Use 1 / sqrt(L) at every layer instead."""

    def constants(self, layers):
        depth = np.full(layers, layers) if self.constant else np.arange(1, layers + 1)
        return {kind: {"scale": 1 / np.sqrt(depth)} for kind in KINDS}

    def read(self, params, carry, history, s):
        x, *rest = super().read(params, carry, history, s)
        return (params["scale"] * x).astype(x.dtype), *rest
