"""The read of Attention Residuals from a growing buffer of sources, with its backward pass.

    e_i = u . v_i rho_i,  rho_i = 1 / sqrt(mean(v_i^2) + eps),  p = softmax_i(e),  z = sum_i p_i v_i

over the first `count` rows v_i of a buffer and one source outside of it (Attention Residuals, arXiv
2603.15031; u is the query times the key scale). With c the cotangent of z and n_i = rho_i v_i,

    g_i  = p_i (c . v_i - c . z)
    dv_i = p_i c + g_i rho_i (u - n_i e_i / D),     du = sum over tokens and sources of g_i n_i

Buffers are read up to the smallest of a few static sizes that holds all live rows: XLA has no
loop over a traced number of rows that it can fuse.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from depthjax.kernels.rms_norm import at_least_float32

SIZES = 4
"""Most static sizes of a read. More of them read fewer dead rows, and take longer to compile."""


def prefixes(rows: int) -> list[int]:
    """The static sizes of the reads of a buffer with so many rows, the last one all of them; none
    smaller than 4 rows."""
    parts = max(1, min(SIZES, rows // 4))
    return [-(-rows * part // parts) for part in range(1, parts + 1)]


def over_prefix(rows: int, count: jax.Array, make: Callable[[int], Callable], *operands: Any):
    """make(n)(*operands) for the smallest prefix size n that holds `count` of the `rows`."""
    sizes = prefixes(rows)
    if len(sizes) == 1:
        return make(rows)(*operands)
    index = jnp.searchsorted(jnp.asarray(sizes[:-1]), count)
    return jax.lax.switch(index, [make(size) for size in sizes], *operands)


def score(v: jax.Array, u: jax.Array, eps) -> tuple[jax.Array, jax.Array]:
    """(e, rho), both [...], of sources v [..., D] in at least fp32."""
    rho = jax.lax.rsqrt(jnp.mean(v * v, axis=-1) + eps)
    return jnp.sum(v * u, axis=-1) * rho, rho


def live_rows(history: jax.Array, size: int, count) -> tuple[jax.Array, jax.Array]:
    """(the first `size` rows in at least fp32 with zeros in the dead ones, live [size, 1, ...])."""
    live = (jnp.arange(size) < count).reshape(-1, *[1] * (history.ndim - 1))
    return at_least_float32(jnp.where(live, history[:size], 0)), live


def _widen(x: jax.Array, rows: int, fill: float) -> jax.Array:
    return jnp.pad(x, [(0, rows - x.shape[0])] + [(0, 0)] * (x.ndim - 1), constant_values=fill)


@jax.custom_vjp
def depth_read(history, newest, direction, count, eps):
    """(mixture, history): one query mixes the live rows of a buffer and one more source.

    history: [N, ..., D], of which rows 0..count-1 are live, and the others, whatever they hold, are
    not seen; newest: [..., D]; direction: [D], query times key scale, in at least fp32. The mixture
    [..., D] is in at least fp32. The history comes back so that its cotangent passes through: the
    backward pass adds to it in place. Keeps two numbers a token and source.
    """
    return _forward(history, newest, direction, count, eps)[0]


def _forward(history, newest, u, count, eps):
    rows = history.shape[0]
    own = at_least_float32(newest)
    own_logit, own_rho = score(own, u, eps)

    def make(size):
        def read(history):
            v, live = live_rows(history, size, count)
            logits, rho = score(v, u, eps)
            logits = jnp.where(live[..., 0], logits, -jnp.inf)
            lse = jnp.logaddexp(jax.nn.logsumexp(logits, axis=0), own_logit)
            z = jnp.sum(jnp.exp(logits - lse)[..., None] * v, axis=0)
            return z, lse, _widen(logits, rows, -jnp.inf), _widen(rho, rows, 0.0)

        return read

    z, lse, logits, rho = over_prefix(rows, count, make, history)
    z = z + jnp.exp(own_logit - lse)[..., None] * own
    kept = (history, newest, u, count, eps, logits, rho, lse, own_logit, own_rho)
    return (z, history), kept


def _backward(kept, cotangents):
    history, newest, u, count, _, logits, rho, lse, own_logit, own_rho = kept
    c, d_history = cotangents
    rows, width = history.shape[0], history.shape[-1]
    tokens = tuple(range(c.ndim - 1))
    own, own_p = at_least_float32(newest), jnp.exp(own_logit - lse)
    own_s = jnp.sum(c * own, axis=-1)

    def make(size):
        def add(history, d_history):
            v, live = live_rows(history, size, count)
            e = jnp.where(live[..., 0], logits[:size], 0)
            p = jnp.where(live[..., 0], jnp.exp(e - lse), 0)
            s = jnp.sum(c * v, axis=-1)
            delta = jnp.sum(p * s, axis=0) + own_p * own_s
            g = p * (s - delta) * rho[:size]
            update = p[..., None] * c + g[..., None] * (u - v * (rho[:size] * e / width)[..., None])
            du = jnp.sum(g[..., None] * v, axis=(0, *(1 + t for t in tokens)))
            new = (at_least_float32(d_history[:size]) + update).astype(d_history.dtype)
            return jax.lax.dynamic_update_slice_in_dim(d_history, new, 0, 0), delta, du

        return add

    d_history, delta, du = over_prefix(rows, count, make, history, d_history)
    g = own_p * (own_s - delta) * own_rho
    d_own = own_p[..., None] * c
    d_own += g[..., None] * (u - own * (own_rho * own_logit / width)[..., None])
    du += jnp.sum(g[..., None] * own, axis=tokens)
    return d_history, d_own.astype(newest.dtype), du.astype(u.dtype), None, None


depth_read.defvjp(_forward, _backward)
