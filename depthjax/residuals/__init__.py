"""Residual connections for any Flax model: `base` explains the protocol, each variant is one file.

Every file of this folder is imported, so a variant is registered by being here. Imports jax and
flax alone.
"""

import importlib
import pkgutil

from depthjax.residuals.attnres import BlockAttnRes, FullAttnRes
from depthjax.residuals.base import (
    ATTENTION,
    KINDS,
    MLP,
    REGISTRY,
    Parameter,
    Residual,
    UpdateScale,
    append,
    swap_rows,
)
from depthjax.residuals.completep import CompleteP
from depthjax.residuals.deepnorm import DeepNorm
from depthjax.residuals.depth_mup import DepthMuP
from depthjax.residuals.hc import HC
from depthjax.residuals.keel import Keel
from depthjax.residuals.lns import LNS
from depthjax.residuals.mhc import MHC, MHCLite, MHCNative, MHCStatic
from depthjax.residuals.moda import MoDA, PostLNMoDA
from depthjax.residuals.module import ResidualModule, apply_branches, init_params, layered
from depthjax.residuals.post_ln import PostLN
from depthjax.residuals.pre_ln import PreLN
from depthjax.residuals.sandwich_ln import SandwichLN

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")

__all__ = [
    "ATTENTION",
    "HC",
    "KINDS",
    "LNS",
    "MHC",
    "MLP",
    "REGISTRY",
    "BlockAttnRes",
    "CompleteP",
    "DeepNorm",
    "DepthMuP",
    "FullAttnRes",
    "Keel",
    "MHCLite",
    "MHCNative",
    "MHCStatic",
    "MoDA",
    "Parameter",
    "PostLN",
    "PostLNMoDA",
    "PreLN",
    "Residual",
    "ResidualModule",
    "SandwichLN",
    "UpdateScale",
    "append",
    "apply_branches",
    "init_params",
    "layered",
    "swap_rows",
]
