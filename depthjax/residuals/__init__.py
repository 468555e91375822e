"""Residual connections for any Flax model: `base` explains the protocol, each variant is one file.

Imports jax and flax alone.
"""

from depthjax.residuals.attnres import BlockAttnRes, FullAttnRes
from depthjax.residuals.base import (
    ATTENTION,
    KINDS,
    MLP,
    Parameter,
    Residual,
    ResidualModule,
    append,
    swap_rows,
)
from depthjax.residuals.deepnorm import DeepNorm
from depthjax.residuals.hc import HC
from depthjax.residuals.keel import Keel
from depthjax.residuals.lns import LNS
from depthjax.residuals.mhc import MHC, MHCNative, MHCStatic
from depthjax.residuals.moda import MoDA, PostLNMoDA
from depthjax.residuals.post_ln import PostLN
from depthjax.residuals.pre_ln import PreLN
from depthjax.residuals.sandwich_ln import SandwichLN

REGISTRY: dict[str, type[Residual]] = {
    variant.name: variant
    for variant in (
        PreLN,
        PostLN,
        SandwichLN,
        LNS,
        DeepNorm,
        Keel,
        HC,
        MHC,
        FullAttnRes,
        BlockAttnRes,
        MoDA,
        PostLNMoDA,
        MHCNative,
        MHCStatic,
    )
}

__all__ = [
    "ATTENTION",
    "HC",
    "KINDS",
    "LNS",
    "MHC",
    "MLP",
    "REGISTRY",
    "BlockAttnRes",
    "DeepNorm",
    "FullAttnRes",
    "Keel",
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
    "append",
    "swap_rows",
]
