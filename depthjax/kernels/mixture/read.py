"""The read of Attention Residuals from a growing buffer of sources, with its backward pass.

    e_i = u . v_i rho_i,  rho_i = 1 / sqrt(mean(v_i^2) + eps),  p = softmax_i(e),  z = sum_i p_i v_i

over the first `count` rows v_i of a buffer and one source outside of it (Attention Residuals, arXiv
2603.15031; u is the query times the key scale). With c the cotangent of z and n_i = rho_i v_i,

    g_i  = p_i (c . v_i - c . z)
    dv_i = p_i c + g_i rho_i (u - n_i e_i / D),     du = sum over tokens and sources of g_i n_i
"""

import functools

import jax
import jax.numpy as jnp

from depthjax.kernels.arguments import check_array, check_given, check_number, check_shapes
from depthjax.kernels.choice import Implementation
from depthjax.kernels.mixture import mosaic_tpu_backward, sharded
from depthjax.kernels.over_mesh import frees_axes, platform
from depthjax.kernels.rms_norm import at_least_float32, rms_norm


@frees_axes("history", (0, True), (1, True), (0, True))
def depth_read(
    history: jax.Array,
    newest: jax.Array,
    direction: jax.Array,
    count: jax.Array | int,
    eps: jax.Array | float,
    output_scale: jax.Array | None = None,
    *,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(mixture, history, newest): one query mixes the live rows of a buffer and one more source.

    history: [N, ..., D], of which rows 0..count-1 are live, and the others, whatever they hold, are
    not seen; newest: [..., D]; direction: [D], query times key scale, in at least fp32. The mixture
    [..., D] is in at least fp32; with the scale [D] of the RMSNorm that follows it, of the same
    eps, it comes out normalised and rounded to the dtype of `newest`. What was mixed comes
    back for those who read it next, so that its cotangents pass through: the backward pass adds to
    them in place, to the history's in the live rows.

    Implementations: "xla", which keeps two numbers a token and source and reads dead rows, and, of
    bfloat16 or fp32 sources, "mosaic_tpu" and "mosaic_gpu" (from Hopper on, of a width that is a
    multiple of 128), which keep nothing and move each live source once each way (a GPU reads it a
    second time backward, of its cache); they have no forward-mode derivative. Raises ValueError
    where arguments do not go together.
    """
    check_array("history", history, "[N, ..., D]", least=0)
    check_given(newest=newest, direction=direction)
    vectors = {"direction": direction, "output_scale": output_scale}
    shapes = {name: (vector, history.shape[-1:]) for name, vector in vectors.items()}
    check_shapes("history", history, newest=(newest, history.shape[1:]), **shapes)
    check_number("count", count, 0, len(history), "how many rows are live")
    takes = mosaic_tpu_backward.fits(history, newest)
    form = sharded.form_of(implementation, history, newest, tpu=takes)
    if form != "xla":
        return _mosaic(form, history, newest, direction, output_scale, count, eps)
    mixture, *mixed = _read(history, newest, direction, count, eps)
    if output_scale is not None:
        mixture = rms_norm(mixture, output_scale, eps).astype(newest.dtype)
    return mixture, *mixed


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mosaic(form, history, newest, direction, scale, count, eps):
    dtype = jnp.float32 if scale is None else newest.dtype
    mixture, _ = sharded.mix(form, history, count, newest, direction, eps, scale, dtype)
    return mixture, history, newest


def _mosaic_forward(form, *arguments):
    return _mosaic(form, *arguments), arguments


def _mosaic_backward(form, arguments, cotangents):
    history, newest, direction, scale, count, eps = arguments
    given = history, count, newest, direction, eps, scale
    found = sharded.mix_backward(form, *given, *cotangents)
    d_scale = None if scale is None else found.scale.astype(scale.dtype)
    return found.rows, found.newest, found.direction.astype(direction.dtype), d_scale, None, None


_mosaic.defvjp(_mosaic_forward, _mosaic_backward)


def score(v: jax.Array, u: jax.Array, eps) -> tuple[jax.Array, jax.Array]:
    """(e, rho), both [...], of sources v [..., D] in at least fp32."""
    rho = jax.lax.rsqrt(jnp.mean(v * v, axis=-1) + eps)
    return jnp.sum(v * u, axis=-1) * rho, rho


def live_rows(history: jax.Array, size: int, count) -> tuple[jax.Array, jax.Array]:
    """(the first `size` rows in at least fp32 with zeros in the dead ones, live [size, 1, ...])."""
    live = (jnp.arange(size) < count).reshape(-1, *[1] * (history.ndim - 1))
    return at_least_float32(jnp.where(live, history[:size], 0)), live


def weighted_sum(weights: jax.Array, v: jax.Array) -> jax.Array:
    """sum_i weights[i, ...] v[i, ..., :] -> [..., D].

    On a CPU row by row, which fuses into one loop: XLA hands the sum over the leading axis to a
    library there, for which it writes the weights out D times.
    """
    if platform() == "cpu":
        terms = (weights[i][..., None] * v[i] for i in range(len(v)))
        return sum(terms, jnp.zeros(v.shape[1:], v.dtype))
    return jnp.sum(weights[..., None] * v, axis=0)


@jax.custom_vjp
def _read(history, newest, direction, count, eps):
    return _forward(history, newest, direction, count, eps)[0]


def _forward(history, newest, u, count, eps):
    v, live = live_rows(history, history.shape[0], count)
    logits, rho = score(v, u, eps)
    logits = jnp.where(live[..., 0], logits, -jnp.inf)
    own = at_least_float32(newest)
    own_logit, own_rho = score(own, u, eps)
    most = jnp.maximum(jnp.max(logits, axis=0, initial=-jnp.inf), own_logit)  # always finite
    total = jnp.sum(jnp.exp(logits - most), axis=0) + jnp.exp(own_logit - most)
    lse = most + jnp.log(total)
    z = weighted_sum(jnp.exp(logits - lse), v)
    z += jnp.exp(own_logit - lse)[..., None] * own
    return (z, history, newest), (history, newest, u, count, logits, rho, lse, own_logit, own_rho)


def _backward(kept, cotangents):
    history, newest, u, count, logits, rho, lse, own_logit, own_rho = kept
    c, d_history, d_newest = cotangents
    tokens = tuple(range(c.ndim - 1))
    v, live = live_rows(history, history.shape[0], count)
    own, own_p = at_least_float32(newest), jnp.exp(own_logit - lse)
    p = jnp.exp(logits - lse)
    dots, own_dot = jnp.sum(c * v, axis=-1), jnp.sum(c * own, axis=-1)
    delta = jnp.sum(p * dots, axis=0) + own_p * own_dot

    def cotangent(v, p, dot, e, rho):
        """(dv, du by token) of sources v."""
        g = p * (dot - delta) * rho
        radial = (rho * e / v.shape[-1])[..., None] * v
        return p[..., None] * c + g[..., None] * (u - radial), g[..., None] * v

    dv, du = cotangent(v, p, dots, jnp.where(live[..., 0], logits, 0), rho)
    d_own, own_du = cotangent(own, own_p, own_dot, own_logit, own_rho)
    d_newest = (at_least_float32(d_newest) + d_own).astype(newest.dtype)
    d_history = (at_least_float32(d_history) + dv).astype(d_history.dtype)
    du = jnp.sum(du, axis=(0, *(1 + t for t in tokens))) + jnp.sum(own_du, axis=tokens)
    return d_history, d_newest, du.astype(u.dtype), None, None


_read.defvjp(_forward, _backward)
