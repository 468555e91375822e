"""Softmax attention over depth for one query: the read of Attention Residuals, in plain XLA.

The key of a source is its RMS-normalised self, the value is the raw source (Attention Residuals,
arXiv 2603.15031; the query and the key scale enter only as their product):

    e_i = (query * key_scale) . v_i / sqrt(mean(v_i^2) + eps)       no 1/sqrt(D), no temperature
    p   = softmax_i(e),      z = sum_i p_i v_i

The paper's ablations of the weights are `MixtureRule`s; the input-independent one has biases alone.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from depthjax.kernels.arguments import check_array, check_number, check_shapes
from depthjax.kernels.choice import Implementation
from depthjax.kernels.mixture import mosaic_tpu_backward, sharded
from depthjax.kernels.mixture.rule import PLAIN, Keys, MixtureRule
from depthjax.kernels.over_mesh import frees_axes
from depthjax.kernels.rms_norm import at_least_float32, rms_norm


def _logits(sources: jax.Array, direction: jax.Array | None, eps, keys: Keys) -> jax.Array:
    """[..., D] -> [...]: the dot product of each source, normalised or raw, with `direction` [D];
    zeros without one."""
    if direction is None:
        return jnp.zeros(sources.shape[:-1], sources.dtype)
    # Default precision would round fp32 operands to bf16 on a TPU's matrix unit.
    products = jnp.einsum("...d,d->...", sources, direction, precision="highest")
    if keys == "raw":
        return products
    return products * jax.lax.rsqrt(jnp.mean(sources * sources, axis=-1) + eps)


def _largest(logits: jax.Array, keep: jax.Array | int) -> jax.Array:
    """True at the `keep` largest of logits [N, ...] along N; of equals the first ones."""
    order = jnp.argsort(-logits, axis=0, stable=True)
    return jnp.argsort(order, axis=0) < keep


def _mix(sources, query, key_scale, count, newest, eps, bias, keep, rule):
    """Weights [N (+ 1), ...] and mixture [..., D], both in at least fp32."""
    direction = None if query is None else at_least_float32(query)
    if key_scale is not None:
        direction = direction * at_least_float32(key_scale)
    masked = count is not None or rule.window is not None
    if masked:
        rows = sources.shape[0]
        live = rule.seen(rows, rows if count is None else count, newest is not None)
        live = live.reshape(-1, *[1] * (sources.ndim - 1))  # [N, 1, ...]
        # Rows at and beyond the count hold anything, NaN included, and must not be seen at all.
        sources = jnp.where(live, sources, 0)
    sources = at_least_float32(sources)
    logits = _logits(sources, direction, eps, rule.keys)
    if masked:
        logits = jnp.where(live[..., 0], logits, -jnp.inf)
    if newest is not None:
        newest = at_least_float32(newest)
        own = _logits(newest, direction, eps, rule.keys)
        logits = jnp.concatenate([logits, own[None]])
    if bias is not None:
        bias = at_least_float32(bias)
        if newest is not None and count is not None:  # the newest comes right after the live rows
            bias = jnp.concatenate([bias[:-1], jax.lax.dynamic_slice(bias, (count,), (1,))])
        logits = logits + bias.reshape(-1, *[1] * (logits.ndim - 1))
    if keep is not None:
        logits = jnp.where(_largest(logits, keep), logits, -jnp.inf)
    weights = jax.nn.softmax(logits, 0) if rule.scores == "softmax" else jax.nn.sigmoid(logits)
    mixture = jnp.einsum(
        "n...,n...d->...d", weights[: sources.shape[0]], sources, precision="highest"
    )
    if newest is not None:
        mixture = mixture + weights[-1][..., None] * newest
    return weights, mixture


def depth_weights(
    sources: jax.Array,
    query: jax.Array | None,
    key_scale: jax.Array | None = None,
    *,
    count: jax.Array | int | None = None,
    newest: jax.Array | None = None,
    eps: float | jax.Array = 1e-6,
    bias: jax.Array | None = None,
    keep: jax.Array | int | None = None,
    rule: MixtureRule = PLAIN,
) -> jax.Array:
    """The weights of `depth_mix` (same arguments): [N, ...], or [N + 1, ...] with `newest` last;
    exactly zero at the rows that are not live or not seen; in at least fp32."""
    sources = _stacked(sources)
    _check(sources, newest, count, bias, keep, query=query, key_scale=key_scale)
    _check_rule(rule, query, key_scale, bias)
    return _mix(sources, query, key_scale, count, newest, eps, bias, keep, rule)[0]


@frees_axes("sources", (0, True))
def depth_mix(
    sources: jax.Array | Sequence[jax.Array],
    query: jax.Array | None,
    key_scale: jax.Array | None = None,
    *,
    count: jax.Array | int | None = None,
    newest: jax.Array | None = None,
    eps: float | jax.Array = 1e-6,
    bias: jax.Array | None = None,
    keep: jax.Array | int | None = None,
    rule: MixtureRule = PLAIN,
    output_scale: jax.Array | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Mixes depth sources with one learned query, or with none by `bias` alone.

    sources: [N, ..., D], or N arrays [..., D], which are stacked; query, key_scale (None: ones):
    [D]; count: rows 0..count-1 are live (None: all N); newest: one more source [..., D] outside the
    buffer; bias [N (+ 1)]: added to the logits in order of age, so that `newest` takes the entry
    after the live rows; keep: so many of the largest logits stay in the softmax, of equal ones the
    older; rule: the paper's ablations of the weights; output_scale [D]: the RMSNorm that follows
    the mixture, taken in the same precision and with the same eps. Returns [..., D] in the dtype of
    the sources. Statistics, softmax and sum are in at least fp32, rounded once at the end. At least
    one source must be live.

    Implementations: "xla", which reads each source twice, and again for the backward pass, and, of
    bfloat16 or fp32 sources, without bias and keep and with a query, "mosaic_tpu" and, without a
    rule, "mosaic_gpu" (from Hopper on, of a width that is a multiple of 128), which read each live
    source that the rule sees once forward and once backward (a GPU a second time, of its cache),
    and have no forward-mode derivative. Raises ValueError where arguments do not go together.
    """
    sources = _stacked(sources)
    vectors = {"query": query, "key_scale": key_scale, "output_scale": output_scale}
    _check(sources, newest, count, bias, keep, **vectors)
    _check_rule(rule, query, key_scale, bias)
    by_query = bias is None and keep is None
    on_gpu = by_query and rule == PLAIN
    on_tpu = by_query and mosaic_tpu_backward.fits(sources, newest)
    form = sharded.form_of(implementation, sources, newest, tpu=on_tpu, gpu=on_gpu)
    if form != "xla":
        if not by_query:
            raise ValueError("bias or keep is given: only implementation='xla' takes them")
        if form == "mosaic_gpu" and not on_gpu:
            raise ValueError(f"rule is {rule}: implementation='mosaic_gpu' takes none")
        direction = at_least_float32(query)
        if key_scale is not None:
            direction = direction * at_least_float32(key_scale)
        return _mosaic(form, rule, sources, newest, direction, output_scale, count, eps)

    @jax.checkpoint  # or the backward pass would keep the sources once more, in fp32
    def read(sources, newest, query, key_scale, bias, output_scale):
        _, mixture = _mix(sources, query, key_scale, count, newest, eps, bias, keep, rule)
        if output_scale is not None:
            mixture = rms_norm(mixture, output_scale, eps)
        return mixture.astype(sources.dtype)

    return read(sources, newest, query, key_scale, bias, output_scale)


def _stacked(sources) -> jax.Array:
    """N arrays [..., D] as one; one that they are already, as it is."""
    if hasattr(sources, "ndim"):
        return sources
    shapes = {np.shape(source) for source in sources}
    if len(shapes) != 1:
        raise ValueError(
            f"sources have shapes {sorted(shapes)}: give at least one, all of one shape"
        )
    return jnp.stack(list(sources))


def _check(sources, newest, count, bias, keep, **vectors) -> None:
    """Raises ValueError with one sentence where an argument does not go with the sources."""
    check_array("sources", sources, "[N, ..., D]")
    (rows, *_), own = sources.shape, newest is not None
    shapes = {name: (vector, sources.shape[-1:]) for name, vector in vectors.items()}
    shapes |= {"newest": (newest, sources.shape[1:]), "bias": (bias, (rows + own,))}
    check_shapes("sources", sources, **shapes)
    check_number("count", count, 0 if own else 1, rows, "how many sources are live")
    check_number("keep", keep, 1, math.inf, "how many logits stay")


def _check_rule(rule, query, key_scale, bias) -> None:
    rule.check()
    if query is None and (bias is None or key_scale is not None):
        raise ValueError("query is None: give bias [N], which are the logits, and no key_scale")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mosaic(form, rule, sources, newest, direction, scale, count, eps):
    count = sources.shape[0] if count is None else count
    given = sources, count, newest, direction, eps, scale
    return sharded.mix(form, *given, sources.dtype, rule)[0]


def _mosaic_forward(form, rule, *arguments):
    return _mosaic(form, rule, *arguments), arguments


def _mosaic_backward(form, rule, arguments, cotangent):
    sources, newest, direction, scale, count, eps = arguments
    all_seen = count is None and rule.window is None
    count, d_sources = sources.shape[0] if count is None else count, None
    if not all_seen:
        d_sources = jnp.zeros_like(sources)
    arrays = sources, count, newest, direction, eps, scale, cotangent, d_sources, None
    found = sharded.mix_backward(form, *arrays, rule)
    d_scale = None if scale is None else found.scale.astype(scale.dtype)
    return found.rows, found.newest, found.direction.astype(direction.dtype), d_scale, None, None


_mosaic.defvjp(_mosaic_forward, _mosaic_backward)
