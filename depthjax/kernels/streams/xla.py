"""Reading and mixing streams, as XLA does it; see `read_streams`.

Streams are taken apart by `jnp.unstack`: outside jit, a plain loop over an array with an explicit
sharding gives unsharded parts.
"""

import functools

import jax
import jax.numpy as jnp

from depthjax.kernels.rms_norm import at_least_float32, rms_norm
from depthjax.kernels.streams.spelling import beside


def stream_products(
    streams: jax.Array, columns: jax.Array | None
) -> tuple[jax.Array | None, jax.Array]:
    """(products, mean squares [m, ...]) of streams [m, ..., D], in at least fp32: with columns
    [D, c], those of each stream, [c, m, ...]; with columns [m, D, c], those of the concatenation
    of the streams, [c, ...]; without columns, none.

    A norm in front of the columns is a factor a token, which commutes with the product: so no
    normalised streams are held.
    """
    wide = [at_least_float32(stream) for stream in jnp.unstack(streams)]
    squares = jnp.stack([jnp.mean(stream * stream, axis=-1) for stream in wide])
    if columns is None:
        return None, squares
    columns = columns.astype(squares.dtype)
    # One product a stream: a batched one would copy the streams.
    if columns.ndim == 2:
        products = [
            exact_product("dc,...d->c...", columns, stream) for stream in jnp.unstack(streams)
        ]
        return jnp.stack(products, axis=1), squares
    pairs = zip(columns, jnp.unstack(streams), strict=True)
    return sum(exact_product("dc,...d->c...", *pair) for pair in pairs), squares


def exact_product(subscripts, small, streams):
    """einsum in the precision of `small`, fp32 or wider, whose last subscript is not summed.

    For bf16 streams `small` is split into three terms of bf16, beside each other: that is as exact
    as fp32, and takes one pass over streams that are never widened. A CPU has no such product.
    """

    def plain(small, streams):
        return jnp.einsum(subscripts, small, at_least_float32(streams), precision="highest")

    if streams.dtype != jnp.bfloat16:
        return plain(small, streams)
    split = functools.partial(_split_product, subscripts)
    return jax.lax.platform_dependent(small, streams, cpu=plain, default=split)


def _split_product(subscripts, small, streams):
    terms, rest = [], small
    for _ in range(3):  # a plain cast there and back might be optimised away
        terms.append(jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7))
        rest = rest - terms[-1]
    axis = subscripts.index("c") if subscripts[0] == "c" else small.ndim - 1
    beside = jnp.concatenate(terms, axis=axis).astype(jnp.bfloat16)
    result = jnp.einsum(subscripts, beside, streams, preferred_element_type=small.dtype)
    return sum(jnp.split(result, 3, axis=subscripts.partition("->")[2].index("c")))


def _weighted(weights, streams):
    """sum_j weights_j H_j in at least fp32; weights: [m, ...], or [m, n, ...] for n sums. Spelled
    out, so that it fuses: a product of so small matrices would copy the streams. On a CPU, fusion
    would compute its operands again for every feature."""

    def product(weights, streams):
        subscripts = "m...,m...d->...d" if weights.ndim < streams.ndim else "mn...,m...d->n...d"
        return jnp.einsum(subscripts, weights, at_least_float32(streams), precision="highest")

    def spelled(weights, streams):
        pairs = zip(jnp.unstack(weights), jnp.unstack(streams), strict=True)
        return sum(w[..., None] * at_least_float32(stream) for w, stream in pairs)

    return jax.lax.platform_dependent(weights, streams, cpu=product, default=spelled)


def forward(weigh, eps, gates, columns, scale, streams):
    """((x, mixed, write), what the backward pass needs beside its arguments)."""
    products, squares = stream_products(streams, columns)
    read, write, transport = weigh(beside(gates, streams.ndim - 2), products, squares)
    x = rms_norm(_weighted(read, streams), scale, eps).astype(streams.dtype)
    mixed = _weighted(jnp.swapaxes(transport, 0, 1), streams).astype(streams.dtype)
    return (x, mixed, write), (products, squares)


def backward(weigh, eps, gates, columns, scale, streams, small, by_x, by_mixed, by_write):
    """The cotangents of gates, columns, scale and streams, in at least fp32 but for the last."""
    tokens = streams.ndim - 2
    (read, _, transport), pull = jax.vjp(
        lambda gates, *small: weigh(beside(gates, tokens), *small), gates, *small
    )
    x, pull_norm = jax.vjp(
        lambda x, scale: rms_norm(x, scale, eps), _weighted(read, streams), scale
    )
    by_x, by_scale = pull_norm(by_x.astype(x.dtype))

    wide = [at_least_float32(stream) for stream in jnp.unstack(streams)]
    by_read = jnp.stack([jnp.sum(by_x * old, -1) for old in wide])
    by_transport = jnp.stack(
        [
            jnp.stack([jnp.sum(at_least_float32(new) * old, -1) for old in wide])
            for new in jnp.unstack(by_mixed)
        ]
    )
    by_gates, by_products, by_squares = pull((by_read, by_write, by_transport))

    by_streams = read[..., None] * by_x + _weighted(transport, by_mixed)
    by_streams += (by_squares * (2 / streams.shape[-1]))[..., None] * at_least_float32(streams)
    by_columns = None
    if columns is not None:
        by_columns = columns_cotangent(by_products, streams, columns.ndim)
        by_streams += _by_products(by_products, columns.astype(by_products.dtype))
    return by_gates, by_columns, by_scale, by_streams.astype(streams.dtype)


def columns_cotangent(by_products, streams, ndim):
    """That of columns with `ndim` axes, from those of the products."""
    if ndim == 2:
        pairs = zip(jnp.unstack(by_products, axis=1), jnp.unstack(streams), strict=True)
        return sum(exact_product("c...,...d->dc", *pair) for pair in pairs)
    return jnp.stack(
        [exact_product("c...,...d->dc", by_products, stream) for stream in jnp.unstack(streams)]
    )


def _by_products(by_products, columns):
    """What the products leave at the streams, [m, ..., D]."""
    if columns.ndim == 2:
        return jnp.einsum("cm...,dc->m...d", by_products, columns, precision="highest")
    # As one product over all m c columns, those of the other streams times zero: a product a
    # stream would be held, as would a batched one.
    m, _, c = columns.shape
    own = jnp.eye(m, dtype=by_products.dtype).reshape(m, m, *[1] * by_products.ndim)
    spread = (own * by_products).reshape(m, m * c, *by_products.shape[1:])
    rows = jnp.swapaxes(columns, 1, 2).reshape(m * c, -1)
    return jnp.einsum("mc...,cd->m...d", spread, rows, precision="highest")
