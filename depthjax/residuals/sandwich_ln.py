"""Sandwich-LN: the branch output is normalised as well as its input."""

import dataclasses

from depthjax.kernels import rms_norm
from depthjax.residuals.base import KINDS, Parameter
from depthjax.residuals.pre_ln import PreLN


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandwichLN(PreLN):
    """Sandwich-LN: h <- h + RMSNorm(f(RMSNorm(h))) (Ding et al. 2021; also Peri-LN, Kim et al.
    2025; DepthBench, appendix A).

    Adds a norm scale a sublayer, init 1: 2 L D parameters.
    """

    name = "sandwich_ln"

    def parameters(self, layers, width):
        declared = super().parameters(layers, width)
        post = {"post_norm": Parameter((width,))}
        return {**declared, **{kind: {**declared[kind], **post} for kind in KINDS}}

    def write(self, params, carry, y, aux, s):
        return carry + rms_norm(y, params["post_norm"], self.eps), None
