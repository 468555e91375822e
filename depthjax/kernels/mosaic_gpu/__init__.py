"""Depth kernels for NVIDIA GPUs from Hopper on (Mosaic GPU), over arrays, without gradients of
their own. What `fits` refuses goes to the XLA form."""

from typing import Any

import jax.numpy as jnp

LANES = 128
WIDEST = 7168
"""Widest row: 56 registers of each thread for each of the arrays that are live at once."""


def fits(width: int, *dtypes: Any) -> bool:
    """Whether the kernels take rows of `width` features in these dtypes: a multiple of 128 up to
    7168, in bf16 or fp32. Any number of tokens and of sources goes."""
    narrow = all(jnp.dtype(dtype) in (jnp.bfloat16, jnp.float32) for dtype in dtypes)
    return narrow and width % LANES == 0 and 0 < width <= WIDEST
