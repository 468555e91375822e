"""The branches of a block: attention and MLP. They know nothing of residual connections."""

from depthjax.layers.attention import Attention, Cache
from depthjax.layers.mlp import SwiGLU
from depthjax.layers.rope import rope
from depthjax.layers.stack import stack

__all__ = ["Attention", "Cache", "SwiGLU", "rope", "stack"]
