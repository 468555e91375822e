"""Array functions that carry the cost of depth. They know no module and no config, and of a mesh
only the one in force."""

from depthjax.kernels.depth_mix import depth_mix, depth_weights
from depthjax.kernels.layer_norm import layer_norm
from depthjax.kernels.rms_norm import rms_norm

__all__ = ["depth_mix", "depth_weights", "layer_norm", "rms_norm"]
