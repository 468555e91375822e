"""DeepNorm: Post-LN with an amplified stream and branches that start small."""

import dataclasses

from depthjax.kernels import layer_norm
from depthjax.residuals.post_ln import PostLN


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepNorm(PostLN):
    """DeepNorm: h <- LayerNorm(alpha h + f(h)) with alpha = (2 L)^(1/4) (Wang et al. 2022;
    DepthBench, appendix A).

    The norms of the blocks subtract the mean and have no bias; the final one is an RMSNorm. Init:
    value, output and MLP matrices are scaled by beta = (8 L)^(-1/4), query and key are not.
    Parameters and state as Pre-LN.
    """

    name = "deepnorm"
    positive = ("eps", "alpha")
    peak_lr = 1e-3
    alpha: float | None = None
    """Factor of the stream. None: (2 L)^(1/4)."""

    def fill_in(self, layers, kv_shape):
        alpha = (2 * layers) ** 0.25 if self.alpha is None else self.alpha
        return dataclasses.replace(self, alpha=alpha)

    def init_scales(self, layers, width):
        beta = (8 * layers) ** -0.25
        attention = {f"attention/{name}": beta for name in ("value", "out")}
        return {**attention, **{f"mlp/{name}": beta for name in ("gate", "up", "down")}}

    def write(self, params, carry, y, aux, s):
        return layer_norm(self.alpha * carry + y, params["norm"], self.eps), None
