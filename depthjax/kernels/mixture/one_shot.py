"""Softmax attention over depth for one query: the read of Attention Residuals, in plain XLA.

The key of a source is its RMS-normalised self, the value is the raw source (Attention Residuals,
arXiv 2603.15031; the query and the key scale enter only as their product):

    e_i = (query * key_scale) . v_i / sqrt(mean(v_i^2) + eps)       no 1/sqrt(D), no temperature
    p   = softmax_i(e),      z = sum_i p_i v_i
"""

import jax
import jax.numpy as jnp

from depthjax.kernels.rms_norm import at_least_float32, rms_norm


def _logits(sources: jax.Array, direction: jax.Array, eps: float | jax.Array) -> jax.Array:
    """[..., D] -> [...]: the dot product of each normalised source with `direction` [D]."""
    inverse = jax.lax.rsqrt(jnp.mean(sources * sources, axis=-1) + eps)
    # Default precision would round fp32 operands to bf16 on a TPU's matrix unit.
    return jnp.einsum("...d,d->...", sources, direction, precision="highest") * inverse


def _largest(logits: jax.Array, keep: jax.Array | int) -> jax.Array:
    """True at the `keep` largest of logits [N, ...] along N; of equals the first ones."""
    order = jnp.argsort(-logits, axis=0, stable=True)
    return jnp.argsort(order, axis=0) < keep


def _mix(sources, query, key_scale, count, newest, eps, bias, keep):
    """Weights [N (+ 1), ...] and mixture [..., D], both in at least fp32."""
    direction = at_least_float32(query)
    if key_scale is not None:
        direction = direction * at_least_float32(key_scale)
    if count is not None:
        live = jnp.arange(sources.shape[0]) < count
        live = live.reshape(-1, *[1] * (sources.ndim - 1))  # [N, 1, ...]
        # Rows at and beyond the count hold anything, NaN included, and must not be seen at all.
        sources = jnp.where(live, sources, 0)
    sources = at_least_float32(sources)
    logits = _logits(sources, direction, eps)
    if count is not None:
        logits = jnp.where(live[..., 0], logits, -jnp.inf)
    if newest is not None:
        newest = at_least_float32(newest)
        logits = jnp.concatenate([logits, _logits(newest, direction, eps)[None]])
    if bias is not None:
        bias = at_least_float32(bias)
        if newest is not None and count is not None:  # the newest comes right after the live rows
            bias = jnp.concatenate([bias[:-1], jax.lax.dynamic_slice(bias, (count,), (1,))])
        logits = logits + bias.reshape(-1, *[1] * (logits.ndim - 1))
    if keep is not None:
        logits = jnp.where(_largest(logits, keep), logits, -jnp.inf)
    weights = jax.nn.softmax(logits, axis=0)
    mixture = jnp.einsum(
        "n...,n...d->...d", weights[: sources.shape[0]], sources, precision="highest"
    )
    if newest is not None:
        mixture = mixture + weights[-1][..., None] * newest
    return weights, mixture


def depth_weights(
    sources: jax.Array,
    query: jax.Array,
    key_scale: jax.Array | None = None,
    *,
    count: jax.Array | int | None = None,
    newest: jax.Array | None = None,
    eps: float | jax.Array = 1e-6,
    bias: jax.Array | None = None,
    keep: jax.Array | int | None = None,
) -> jax.Array:
    """The softmax weights of `depth_mix` (same arguments): [N, ...], or [N + 1, ...] with `newest`
    last; exactly zero at the rows that are not live; in at least fp32."""
    return _mix(sources, query, key_scale, count, newest, eps, bias, keep)[0]


def depth_mix(
    sources: jax.Array,
    query: jax.Array,
    key_scale: jax.Array | None = None,
    *,
    count: jax.Array | int | None = None,
    newest: jax.Array | None = None,
    eps: float | jax.Array = 1e-6,
    bias: jax.Array | None = None,
    keep: jax.Array | int | None = None,
    output_scale: jax.Array | None = None,
) -> jax.Array:
    """Mixes depth sources with one learned query.

    sources: [N, ..., D]; query, key_scale (None: ones): [D]; count: rows 0..count-1 are live
    (None: all N); newest: one more source [..., D] outside the buffer; bias [N (+ 1)]: added to
    the logits in order of age, so that `newest` takes the entry after the live rows; keep: so many
    of the largest logits stay in the softmax, of equal ones the older; output_scale [D]: the
    RMSNorm that follows the mixture, taken in the same precision and with the same eps.
    Returns [..., D] in the dtype of the sources. Statistics, softmax and sum are in at least fp32,
    rounded once at the end. At least one source must be live. Reads each source twice.
    """
    _, mixture = _mix(sources, query, key_scale, count, newest, eps, bias, keep)
    if output_scale is not None:
        mixture = rms_norm(mixture, output_scale, eps)
    return mixture.astype(sources.dtype)
