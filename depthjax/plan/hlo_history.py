"""What a compiled program holds of a depth state's history."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from depthjax.models import Shape
from depthjax.plan.hlo import Module
from depthjax.plan.hlo_cost import executions
from depthjax.residuals import Residual


def history_bytes(module: Module, residual: Residual, shape: Shape, dtype: Any) -> int:
    """Of the history's buffers, on one device: each is the largest array with as many rows and as
    wide as it is, wherever the program has one; 0 without a history."""
    like = jax.ShapeDtypeStruct((1, 1, shape.width), jnp.dtype(dtype))
    _, history = jax.eval_shape(lambda x: residual.begin(x, shape.layers), like)
    leaves = jax.tree.leaves(history)
    arrays = [a for run in executions(module)[0] for a in run.instruction.arrays]

    def held(leaf: Any) -> int:
        ends = leaf.shape[0], leaf.shape[-1]
        found = (a for a in arrays if len(a.shape) > 2 and (a.shape[0], a.shape[-1]) == ends)
        # As large as its elements: padding to whole tiles depends on the axes that XLA merges.
        return max((math.prod(a.shape) * leaf.dtype.itemsize for a in found), default=0)

    return sum(map(held, leaves))
