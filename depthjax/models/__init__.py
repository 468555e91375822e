"""Backbones under the residual protocol. No variant is named here."""

from depthjax.models.shapes import SHAPES, Shape, shape_of
from depthjax.models.transformer import Transformer

__all__ = ["SHAPES", "Shape", "Transformer", "shape_of"]
