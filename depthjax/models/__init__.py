"""Backbones under the residual protocol. No variant is named here."""

from depthjax.models.keep import POLICIES, Remat
from depthjax.models.shapes import SHAPES, Shape, shape_of
from depthjax.models.transformer import Transformer

__all__ = ["POLICIES", "SHAPES", "Remat", "Shape", "Transformer", "shape_of"]
