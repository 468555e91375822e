"""Next-token cross entropy, without all the logits at once."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from depthjax.kernels.layout import gather_tokens
from depthjax.kernels.over_mesh import (
    FSDP,
    SEQUENCE,
    TENSOR,
    batch_axes,
    dividing,
    over_batch,
    platform,
)
from depthjax.kernels.rms_norm import at_least_float32
from depthjax.models import Transformer

CHUNK_LOGITS = 2**28
"""Most logits that a device holds at a time: 4096 tokens of 50,280 ids, say. Fewer save little
memory, and each chunk reads the head and adds to its gradient once more."""

CHUNK_LOGITS_CPU = 2**22
"""The same on a CPU, whose cache holds as many (16 MB in fp32)."""


def mean_loss(model: Transformer, input_ids: jax.Array, **options: Any) -> tuple[jax.Array, Any]:
    """fp32 []: the mean of -log p(token t + 1 | tokens 0..t) over all B (T - 1) predictions of
    input_ids int32 [B, T], and what the observer saw; options as in `Transformer.features`."""
    batch, length = input_ids.shape
    share = 1 / (batch * (length - 1))
    return _weighted_loss(model, input_ids, jnp.full(batch, length), share, **options)


def summed_loss(
    model: Transformer, input_ids: jax.Array, lengths: jax.Array, **options: Any
) -> jax.Array:
    """fp32 []: the losses of all predictions within each row's first `lengths` [B] tokens, summed;
    options as in `Transformer.features`.

    A row of n tokens has n - 1 predictions; a row of length 0 none.
    """
    return _weighted_loss(model, input_ids, lengths, 1.0, **options)[0]


def _weighted_loss(model, input_ids, lengths, weight, **options):
    features, seen = model.features(input_ids, **options)
    predicted = jnp.arange(1, input_ids.shape[1] + 1)[None] < lengths[:, None]
    wide = at_least_float32(features).dtype
    weights = jnp.where(predicted, jnp.asarray(weight, wide), 0)
    targets = jnp.roll(input_ids, -1, axis=1)
    return cross_entropy(gather_tokens(features), model.head[...], targets, weights), seen


def cross_entropy(
    features: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    chunks: int | None = None,
) -> jax.Array:
    """sum_bt weights[b, t] (logsumexp(z_bt) - z_bt[targets[b, t]]) with z = features @ head.

    features: [B, T, D]; head: [D, V], cast to the dtype of the features, in which the products are
    taken; targets: int [B, T]; weights: fp32 [B, T]. Result [], in fp32 or wider, and so are the
    softmax and the sum over tokens of the head's gradient.

    The sequence is cut into `chunks` (None: `chunk_count`), and only one chunk's logits
    [B, T / chunks, V] exist at a time. Differentiated, the forward pass takes the gradient of each
    chunk while it has the logits, so that no logit is computed twice; the backward pass only
    scales it. Under a mesh (`jax.set_mesh`) each device takes its own rows and tokens, and the
    head's gradient is summed over devices once, and divided over `fsdp`. A head divided over its
    ids stays so. Raises ValueError for fewer than one chunk.
    """
    batch, length = targets.shape
    if chunks is None:
        chunks = chunk_count(batch, length, head.shape[1])
    if chunks < 1:
        raise ValueError(f"chunks is {chunks}: give at least 1")
    return _cross_entropy(min(chunks, length), features, head, targets, weights)


def chunk_count(batch: int, length: int, vocab: int) -> int:
    """Chunks of a sequence: the fewest with at most CHUNK_LOGITS logits on a device (CPU:
    CHUNK_LOGITS_CPU), and a divisor of the length if one is less than twice as many."""
    mesh = jax.sharding.get_abstract_mesh()
    for axis in batch_axes(batch):
        batch //= mesh.shape[axis]
    for axis in dividing(length, (SEQUENCE,)):
        length //= mesh.shape[axis]
    for axis in dividing(vocab, (TENSOR,)):
        vocab //= mesh.shape[axis]
    most = CHUNK_LOGITS_CPU if platform() == "cpu" else CHUNK_LOGITS
    least = min(length, -(-batch * length * vocab // most))
    return next((n for n in range(least, 2 * least) if length % n == 0), least)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(chunks, features, head, targets, weights):
    return _chunked(chunks, False, features, head, targets, weights)[0]


def _forward(chunks, features, head, targets, weights):
    loss, *gradients = _chunked(chunks, True, features, head, targets, weights)
    return loss, gradients


def _backward(chunks, gradients, cotangent):
    of_features, of_head, losses = gradients
    scaled = [(g * cotangent).astype(g.dtype) for g in (of_features, of_head, losses)]
    return scaled[0], scaled[1], None, scaled[2]


_cross_entropy.defvjp(_forward, _backward)


def _chunked(chunks, differentiate, features, head, targets, weights):
    """(loss,), or (loss, its gradients by features and head, the loss of each token [B, T])."""
    scattered = bool(set(batch_axes(len(targets))) & set(dividing(len(head), (FSDP,))))
    of_head = P(FSDP) if scattered else None
    results = (None, 0, of_head, 0) if differentiate else (None,)
    local = functools.partial(_local, chunks, differentiate, scattered)
    run = over_batch(local, len(targets), (0, None, 0, 0), results, length=targets.shape[1])
    loss, *gradients = run(features, head.astype(features.dtype), targets, weights)
    if gradients:
        gradients[1] = gradients[1].astype(head.dtype)
    return loss, *gradients


def _local(chunks, differentiate, scattered, axes, features, head, targets, weights):
    """`_chunked` on the tokens of one device; `axes` hold the others. scattered: of the head's
    gradient each device along `fsdp` gets its part."""
    length = targets.shape[1]
    chunks = min(chunks, length)
    wide = jnp.promote_types(features.dtype, jnp.float32)
    size = -(-length // chunks)

    def cut(x):  # [B, T, ...] -> [chunks, B, size, ...]
        pad = [(0, 0)] * x.ndim
        pad[1] = (0, chunks * size - length)
        x = jnp.pad(x, pad) if pad[1][1] else x
        return jnp.moveaxis(x.reshape(x.shape[0], chunks, size, *x.shape[2:]), 1, 0)

    def join(x):  # and back
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], chunks * size, *x.shape[3:])[:, :length]

    def step(carry, chunk):
        loss, of_head = carry
        x, target, weight = chunk
        logits = (x @ head).astype(wide)
        # Compared, not gathered: this way a head that is divided over its ids stays divided.
        hit = target[..., None] == jnp.arange(logits.shape[-1])
        lse = jax.nn.logsumexp(logits, axis=-1)
        losses = lse - jnp.sum(jnp.where(hit, logits, 0), axis=-1)
        loss += jnp.sum(jnp.where(weight == 0, 0, weight * losses))
        if not differentiate:
            return (loss, of_head), None
        by_logits = (jnp.exp(logits - lse[..., None]) - hit) * weight[..., None]
        by_logits = by_logits.astype(x.dtype)
        of_head += jnp.einsum("btd,btv->dv", x, by_logits, preferred_element_type=wide)
        return (loss, of_head), (jnp.einsum("btv,dv->btd", by_logits, head), losses)

    start = jnp.zeros((), wide), jnp.zeros(head.shape if differentiate else (), wide)
    (loss, of_head), kept = jax.lax.scan(
        step, start, jax.tree.map(cut, (features, targets, weights))
    )
    loss = jax.lax.psum(loss, axes)
    if not differentiate:
        return (loss,)
    if scattered:
        of_head = jax.lax.psum_scatter(of_head, FSDP, tiled=True)
        axes = tuple(axis for axis in axes if axis != FSDP)
    return loss, join(kept[0]), jax.lax.psum(of_head, axes), join(kept[1])
