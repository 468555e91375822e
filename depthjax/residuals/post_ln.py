"""Post-LN: the sum is normalised, not the branch input."""

import dataclasses

from depthjax.kernels import rms_norm
from depthjax.residuals.pre_ln import PreLN


@dataclasses.dataclass(frozen=True, kw_only=True)
class PostLN(PreLN):
    """Post-LN: h <- RMSNorm(h + f(h)) at every sublayer (Vaswani et al. 2017).

    Parameters and state as Pre-LN; the final norm stays.
    """

    name = "post_ln"

    def read(self, params, carry, history, s):
        return carry, None, carry, history

    def write(self, params, carry, y, aux, s):
        return rms_norm(carry + y, params["norm"], self.eps), None
