"""CompleteP: as depth-muP, with branches that shrink in proportion to depth."""

import dataclasses

from depthjax.residuals.depth_mup import DepthMuP


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompleteP(DepthMuP):
    """CompleteP: depth-muP with a = 1, h <- h + f(RMSNorm(h)) base_layers / L (Dey et al. 2025;
    DepthBench's code)."""

    name = "completep"
    exponent = 1.0
