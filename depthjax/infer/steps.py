"""Tokens in, logits of the next one out, and a cache that remembers them.

Rows of a batch may have different lengths. They are padded on the right: with so many new tokens in
each row (`counts`), what lies behind them is computed, and seen by nobody. All rows write to the
same slots of the cache, so that one update in place serves them; a row's padding leaves its slots
empty, and its positions count its own tokens alone.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from depthjax.kernels.over_mesh import TENSOR, batch_axes, dividing
from depthjax.layers import Cache
from depthjax.models import Transformer


def empty_cache(model: Transformer, batch: int, size: int) -> Cache:
    """Room for `size` tokens in each of `batch` rows, in the activations' dtype: 2 L S K E elements
    a row, the rows divided over a mesh in force (`jax.set_mesh`) as activations are."""
    shape = model.shape
    axes, heads = batch_axes(batch), dividing(shape.kv_heads, (TENSOR,)) or None

    def zeros(spec: P, *sizes: int, dtype) -> jax.Array:
        made = jnp.zeros(sizes, dtype)
        return jax.lax.with_sharding_constraint(made, spec) if axes or heads else made

    entries = (shape.layers, batch, size, shape.kv_heads, shape.head_dim)
    return Cache(
        key=zeros(P(None, axes or None, None, heads), *entries, dtype=model.dtype),
        value=zeros(P(None, axes or None, None, heads), *entries, dtype=model.dtype),
        live=zeros(P(axes or None), batch, size, dtype=bool),
        length=zeros(P(axes or None), batch, dtype=jnp.int32),
        used=jnp.int32(0),
    )


def prefill(
    model: Transformer,
    input_ids: jax.Array,
    size: int,
    *,
    lengths: jax.Array | None = None,
    chunk: int | None = None,
) -> tuple[jax.Array, Cache]:
    """(logits fp32 [B, V] behind the last token of each row, a cache of `size` slots that holds
    them) of prompts int32 [B, T].

    lengths: [B], at least 1 where prompts are padded on the right; None: all have T tokens. chunk:
    how many tokens are computed at a time (None: all), which bounds the activations. Raises
    ValueError where `size` is less than T, or T rounded up to whole chunks.
    """
    batch, length = input_ids.shape
    chunk = min(chunk or length, length)
    pieces = math.ceil(length / chunk)
    if size < pieces * chunk:
        raise ValueError(f"size is {size}: give at least {pieces * chunk} slots for these tokens")
    lengths = jnp.full(batch, length, jnp.int32) if lengths is None else lengths.astype(jnp.int32)
    padded = jnp.pad(input_ids, ((0, 0), (0, pieces * chunk - length)))
    first, *rest = jnp.split(padded, [chunk], axis=1)

    def counts(piece):
        return jnp.clip(lengths - piece * chunk, 0, chunk).astype(jnp.int32)

    logits, cache = _extend(model, first, empty_cache(model, batch, size), counts(0), None)
    if pieces > 1:

        def step(carry, inputs):
            old, cache = carry
            piece, ids = inputs
            logits, cache = extend(model, ids, cache, counts(piece))
            return (jnp.where(counts(piece)[:, None] > 0, logits, old), cache), None

        ids = jnp.moveaxis(rest[0].reshape(batch, pieces - 1, chunk), 1, 0)
        (logits, cache), _ = jax.lax.scan(step, (logits, cache), (jnp.arange(1, pieces), ids))
    return logits, cache._replace(used=jnp.int32(length))


def extend(
    model: Transformer, input_ids: jax.Array, cache: Cache, counts: jax.Array | None = None
) -> tuple[jax.Array, Cache]:
    """(logits fp32 [B, V] behind the last new token of each row, the cache with them) of tokens
    int32 [B, T] that follow those in the cache, which needs T free slots.

    counts: [B], how many of the T are tokens, the rest being padding on the right (None: all). The
    logits of a row with none mean nothing.
    """
    if counts is None:
        counts = jnp.full(len(input_ids), input_ids.shape[1], jnp.int32)
    return _extend(model, input_ids, cache, counts, cache)


def decode_step(model: Transformer, ids: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """(logits fp32 [B, V] behind it, the cache with it) of one more token a row, int32 [B]."""
    return extend(model, ids[:, None], cache)


def _extend(model, input_ids, cache, counts, past):
    """`extend`; past: the cache, or None while it is known to be empty."""
    features, (keys, values) = model.advance(input_ids, past)
    slot = cache.used
    key, value = (
        jax.lax.dynamic_update_slice_in_dim(buffer, new, slot, 2)
        for buffer, new in ((cache.key, keys), (cache.value, values))
    )
    real = jnp.arange(input_ids.shape[1]) < counts[:, None]
    cache = Cache(
        key=key,
        value=value,
        live=jax.lax.dynamic_update_slice_in_dim(cache.live, real, slot, 1),
        length=cache.length + counts,
        used=slot + input_ids.shape[1],
    )
    last = jnp.maximum(counts - 1, 0)[:, None, None]
    return model.logits(jnp.take_along_axis(features, last, axis=1))[:, 0], cache


def in_activation_dtype(model: Transformer) -> Transformer:
    """The model with its matrices rounded to the activations' dtype, which every product does
    anyway: the same function, of half the bytes where parameters are fp32 and activations bf16.
    Parameters of the residual connection stay as they are."""
    graph, state = nnx.split(model)
    for name in ("embedding", "attention", "mlp", "head"):
        state[name] = jax.tree.map(lambda matrix: matrix.astype(model.dtype), state[name])
    return nnx.merge(graph, state)
