"""Pre-LN: the plain residual stream."""

import dataclasses

import jax

from depthjax.kernels import rms_norm
from depthjax.residuals.base import Parameter, Residual


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreLN(Residual):
    """h <- h + f(RMSNorm(h)) at every sublayer, RMSNorm(h) at the end (Xiong et al. 2020, fig. 1b).

    Parameters: one norm scale a sublayer and a final one, init 1. State: the stream h; no history.
    """

    name = "pre_ln"
    positive = ("eps",)
    eps: float = 1e-6
    """Epsilon of the norms."""

    def parameters(self, layers, width):
        norm = {"norm": Parameter((width,))}
        return {"attention": norm, "mlp": norm, "final": norm}

    def begin(self, embedding, layers):
        return embedding, {}

    def read(self, params, carry, history, s):
        return rms_norm(carry, params["norm"], self.eps), None, carry, history

    def write(self, params, carry, y, aux, s):
        return carry + y, None

    def finish(self, params, carry, history) -> jax.Array:
        return rms_norm(carry, params["norm"], self.eps)

    def stream(self, carry):
        return carry
