"""Inference: prefill and decode with a key-value cache, under any residual connection.

    logits, cache = prefill(model, input_ids, size)      # [B, V] behind the last token
    logits, cache = decode_step(model, next_ids, cache)  # and behind each further one

All three functions are pure: jit them, and donate the cache. Depth state lives within a call, so
that the cache is the same for every residual connection.
"""

from depthjax.infer.generate import Sampling, generate, sample, stream
from depthjax.infer.steps import decode_step, empty_cache, extend, in_activation_dtype, prefill
from depthjax.layers import Cache

__all__ = [
    "Cache",
    "Sampling",
    "decode_step",
    "empty_cache",
    "extend",
    "generate",
    "in_activation_dtype",
    "prefill",
    "sample",
    "stream",
]
