"""Array functions that carry the cost of depth. They know no module and no config, and of a mesh
only the one in force."""

from depthjax.kernels.layer_norm import layer_norm
from depthjax.kernels.mixture.gather import gather_rows, mix_rows
from depthjax.kernels.mixture.one_shot import depth_mix, depth_weights
from depthjax.kernels.mixture.read import depth_read
from depthjax.kernels.mixture.rule import MixtureRule
from depthjax.kernels.rms_norm import rms_norm
from depthjax.kernels.streams.read import read_streams
from depthjax.kernels.streams.spelling import beside, repeat
from depthjax.kernels.streams.xla import stream_products
from depthjax.kernels.two_phase.api import phase1, phase2

__all__ = [
    "MixtureRule",
    "beside",
    "depth_mix",
    "depth_read",
    "depth_weights",
    "gather_rows",
    "layer_norm",
    "mix_rows",
    "phase1",
    "phase2",
    "read_streams",
    "repeat",
    "rms_norm",
    "stream_products",
]
