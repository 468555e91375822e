"""Depth kernels for NVIDIA GPUs from Hopper on (Mosaic GPU), over arrays, without gradients of
their own but for `rounds`. What `fits` refuses goes to the XLA form."""

from typing import Any

import jax.numpy as jnp

LANES = 128
SHARED_BYTES = 224 * 1024
"""Shared memory of a processor that its blocks divide, less what the compiler keeps."""
WIDEST = {2: 7168, 4: 5760}
"""Widest row by bytes of a number: 56 registers of each thread for each of the arrays that are live
at once, and two rows each of four arrays in shared memory."""


def fits(width: int, *dtypes: Any) -> bool:
    """Whether the kernels take rows of `width` features in these dtypes: a multiple of 128 up to
    7168 in bf16, 5760 in fp32. Any number of tokens and of sources goes."""
    sizes = [jnp.dtype(dtype).itemsize for dtype in dtypes]
    narrow = all(jnp.dtype(dtype) in (jnp.bfloat16, jnp.float32) for dtype in dtypes)
    return narrow and width % LANES == 0 and 0 < width <= WIDEST[max(sizes, default=2)]


def fits_streams(streams: int, width: int, dtype: Any, columns: int) -> bool:
    """Whether the kernels of streams take 2 to 32 streams of such rows: two tokens' rows, and for
    128 features so many columns [D] of fp32, fit into shared memory."""
    two_tokens = 2 * streams * width * jnp.dtype(dtype).itemsize
    room = max(two_tokens, 4 * LANES * columns) <= SHARED_BYTES - 2048
    return fits(width, dtype) and room and 2 <= streams <= 32
