"""Both phases and their backward passes in plain XLA: for any dtype and platform."""

import jax
import jax.numpy as jnp

from depthjax.kernels.rms_norm import at_least_float32


def _product(subscripts, *operands):
    """Without the matrix unit's default rounding of fp32 operands to bf16."""
    return jnp.einsum(subscripts, *operands, precision="highest")


def _scored(blocks, directions, count, eps):
    """(v [N, ..., D] with zeros in dead rows, e [S, N, ...] with -inf there, rho [N, ...])."""
    live = None
    if count is not None:
        live = (jnp.arange(len(blocks)) < count).reshape(-1, *[1] * (blocks.ndim - 1))
        blocks = jnp.where(live, blocks, 0)
    v = at_least_float32(blocks)
    rho = jax.lax.rsqrt(jnp.mean(v * v, axis=-1) + eps)
    e = _product("n...d,sd->sn...", v, directions.astype(v.dtype)) * rho
    return v, e if live is None else jnp.where(live[..., 0], e, -jnp.inf), rho


def _weights(e, lse):
    return jnp.where(e > -jnp.inf, jnp.exp(e - lse[:, None]), 0)


def forward1(blocks, directions, count, eps):
    """(mixtures [S, ..., D], lse [S, ...]); see `phase1`."""
    v, e, _ = _scored(blocks, directions, count, eps)
    lse = jax.nn.logsumexp(e, axis=1)
    mixtures = _product("sn...,n...d->s...d", _weights(e, lse), v)
    return mixtures.astype(blocks.dtype), lse


def backward1(blocks, directions, lse, by_mixtures, by_lse, count, eps, into):
    """(cotangent of the blocks, of the directions); see `phase1_backward`."""
    v, e, rho = _scored(blocks, directions, count, eps)
    p, c = _weights(e, lse), by_mixtures.astype(v.dtype)
    dots = _product("s...d,n...d->sn...", c, v)
    delta = jnp.sum(p * dots, axis=1, keepdims=True)
    g = p * (dots - delta + by_lse[:, None])
    radial = rho * jnp.sum(g * jnp.where(p > 0, e, 0), axis=0) / v.shape[-1]
    g = g * rho
    by_v = _product("sn...,s...d->n...d", p, c)
    by_v += _product("sn...,sd->n...d", g, directions.astype(v.dtype))
    by_v -= (rho * radial)[..., None] * v
    by_v = by_v if into is None else into.astype(v.dtype) + by_v
    by_directions = _product("sn...,n...d->sd", g, v)
    return by_v.astype(blocks.dtype if into is None else into.dtype), by_directions


def _read(mixture, lse, p, direction, scalars):
    """(o, p, n, e, w, h, r) of the equations, in at least fp32; r: the inverse norm of h."""
    eps, norm_eps = scalars
    o, p = at_least_float32(mixture), at_least_float32(p)
    rho = jax.lax.rsqrt(jnp.mean(p * p, axis=-1, keepdims=True) + eps)
    e = _product("...d,d->...", p, direction.astype(p.dtype))[..., None] * rho
    w = jax.nn.sigmoid(e - lse[..., None])
    h = o + w * (p - o)
    r = jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + norm_eps)
    return o, p, rho, e, w, h, r


def forward2(mixture, lse, open_sum, branch, direction, norm_scale, fresh, scalars):
    """(x, p); see `phase2`."""
    p = open_sum
    if branch is not None:
        total = at_least_float32(open_sum) + at_least_float32(branch)
        total = total if fresh is None else jnp.where(fresh, branch.astype(total.dtype), total)
        p = total.astype(open_sum.dtype)
    *_, h, r = _read(mixture, lse, p, direction, scalars)
    return (h * r * at_least_float32(norm_scale)).astype(mixture.dtype), p


def backward2(mixture, lse, p, by_x, by_p, direction, norm_scale, scalars):
    """Cotangents of (mixture, lse, p, direction, norm scale), given those of x and p."""
    o, wide, rho, e, w, h, r = _read(mixture, lse, p, direction, scalars)
    by_x, h = by_x.astype(h.dtype), h * r
    tokens = tuple(range(h.ndim - 1))
    by_scale = jnp.sum(by_x * h, axis=tokens)
    c = by_x * norm_scale.astype(h.dtype)
    by_h = r * (c - h * jnp.mean(c * h, axis=-1, keepdims=True))
    by_e = jnp.sum(by_h * (wide - o), axis=-1, keepdims=True) * w * (1 - w)
    along = direction.astype(h.dtype) - wide * (rho * e / h.shape[-1])
    total = by_p.astype(h.dtype) + w * by_h + by_e * rho * along
    by_direction = jnp.sum(by_e * rho * wide, axis=tokens)
    by_mixture = ((1 - w) * by_h).astype(mixture.dtype)
    by_lse = -by_e[..., 0].astype(lse.dtype)
    return by_mixture, by_lse, total.astype(p.dtype), by_direction, by_scale
