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
from depthjax.residuals.pre_ln import PreLN

REGISTRY: dict[str, type[Residual]] = {
    variant.name: variant for variant in (PreLN, FullAttnRes, BlockAttnRes)
}

__all__ = [
    "ATTENTION",
    "KINDS",
    "MLP",
    "REGISTRY",
    "BlockAttnRes",
    "FullAttnRes",
    "Parameter",
    "PreLN",
    "Residual",
    "ResidualModule",
    "append",
    "swap_rows",
]
