"""Depth kernels for NVIDIA GPUs from Hopper on (Mosaic GPU), over arrays, without gradients of
their own. What `fits` refuses goes to the XLA form."""

from typing import Any

import jax.numpy as jnp

LANES = 128
WIDEST = {2: 7168, 4: 5760}
"""Widest row by bytes of a number: 56 registers of each thread for each of the arrays that are live
at once, and two rows each of four arrays in shared memory."""


def fits(width: int, *dtypes: Any) -> bool:
    """Whether the kernels take rows of `width` features in these dtypes: a multiple of 128 up to
    7168 in bf16, 5760 in fp32. Any number of tokens and of sources goes."""
    sizes = [jnp.dtype(dtype).itemsize for dtype in dtypes]
    narrow = all(jnp.dtype(dtype) in (jnp.bfloat16, jnp.float32) for dtype in dtypes)
    return narrow and width % LANES == 0 and 0 < width <= WIDEST[max(sizes, default=2)]
