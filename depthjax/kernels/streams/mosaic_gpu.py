"""Reading and mixing streams on a GPU, from Hopper on; see `read_streams`.

The kernels of `depthjax.kernels.mosaic_gpu.streams` make what has a feature: forward m in, m + 1
out; backward twice 2 m + 1 in, m out. What the weights depend on is measured before, in one pass
where all streams have the same few columns. The weights, numbers of a token, are XLA's, but for
rounds of the same step, which are one launch each way. XLA's are also the products with many
columns, and those that make the columns' cotangents: matrix products.
"""

import functools

import jax
import jax.numpy as jnp

from depthjax.kernels import mosaic_gpu
from depthjax.kernels.over_mesh import over_tokens
from depthjax.kernels.streams.spelling import beside, in_a_loop, pull_weights, repeating
from depthjax.kernels.streams.xla import columns_cotangent, exact_product

MOST_QUERIES = 8
"""Columns up to which a warpgroup measures a stream as fast as it comes."""


def fits(streams: jax.Array, columns: jax.Array | None) -> bool:
    """Whether the kernels take streams [m, ..., D] with these columns."""
    if streams.ndim < 3 or streams.size == 0:
        return False
    m, *_, width = streams.shape
    if columns is not None and columns.dtype.itemsize > 4:
        return False
    rows = 0 if columns is None else columns.size // width
    return mosaic_gpu.fits_streams(m, width, streams.dtype, rows)


def forward(weigh, eps, gates, columns, scale, streams):
    """((x, mixed, write), what the backward pass needs beside its arguments)."""
    from depthjax.kernels.mosaic_gpu import streams as kernels  # late: it takes a while to import

    def local(_, gates, columns, scale, streams):
        flat = streams.reshape(len(streams), -1, streams.shape[-1])
        products, squares = _measure(flat, columns)
        read, write, transport = _weigh(weigh, gates, products, squares)
        x, mixed = kernels.mix(flat, read, transport, scale, eps)
        small = [squares] if products is None else [squares, products]
        small = jnp.concatenate([each.reshape(-1, flat.shape[1]) for each in small])
        write, small = (each.reshape(-1, *streams.shape[1:-1]) for each in (write, small))
        return x.reshape(streams.shape[1:]), mixed.reshape(streams.shape), write, small

    run = over_tokens(local, streams, (None, None, None, 1), (0, 1, 1, 1))
    *results, small = run(gates, columns, scale, streams)
    return tuple(results), small


def backward(weigh, eps, gates, columns, scale, streams, small, by_x, by_mixed, by_write):
    """The cotangents of gates, columns, scale and streams, in fp32 but for the last."""
    from depthjax.kernels.mosaic_gpu import streams as kernels

    def local(axes, gates, columns, scale, streams, small, by_x, by_mixed, by_write):
        m, width = len(streams), streams.shape[-1]
        flat, by_mixed = (each.reshape(m, -1, width) for each in (streams, by_mixed))
        by_x, by_write = by_x.reshape(-1, width), by_write.reshape(m, -1)
        measured = _measured(small.reshape(len(small), -1), m, columns)
        (read, _, transport), pull = jax.vjp(functools.partial(_weigh, weigh), gates, *measured)
        dots = kernels.dots(flat, by_x, by_mixed, read, scale)
        norm, by_gates, (by_products, by_squares) = pull_weights(
            pull, eps, width, read, dots, by_write
        )
        operands, by_columns = [], None
        if columns is not None:
            wide = columns.astype(jnp.float32)  # [D, c] or [m, D, c]
            operands = [wide.T if wide.ndim == 2 else jnp.moveaxis(wide, -1, 0), by_products]
            by_columns = columns_cotangent(by_products, flat, columns.ndim)
        weights = *norm, read, by_squares * (2 / width), transport
        by_streams, by_scale = kernels.spread(flat, by_x, by_mixed, weights, scale, *operands)
        by_params = by_gates, by_columns, by_scale
        if axes:
            by_params = jax.lax.psum(by_params, axes)
        return *by_params, by_streams.reshape(streams.shape)

    axes = (None, None, None, 1, 1, 0, 1, 1), (None, None, None, 1)
    run = over_tokens(local, streams, *axes)
    return run(gates, columns, scale, streams, small, by_x, by_mixed, by_write)


def _weigh(weigh, gates, *measured):
    """The weights of tokens in one axis, which is filled up for `rounds` with the last one again:
    of zeros they might not be finite."""
    tokens = measured[-1].shape[-1]
    missing = -tokens % mosaic_gpu.LANES

    def fill(x):
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], "edge")

    with repeating(_repeat):
        weights = weigh(beside(gates, 1), *jax.tree.map(fill, measured))
    return jax.tree.map(lambda x: x[..., :tokens], weights)


def _repeat(step, state, times):
    from depthjax.kernels.mosaic_gpu import rounds

    of_tokens = jax.tree.leaves(state)[0].shape[-1] > 1
    run = rounds.repeat if of_tokens and rounds.takes(step, state) else in_a_loop
    return run(step, state, times)


def _measure(streams, columns):
    """`stream_products` of streams [m, T, D], of which XLA would copy each for its own product."""
    if columns is not None and columns.ndim == 2 and columns.shape[-1] <= MOST_QUERIES:
        from depthjax.kernels.mosaic_gpu.queries import products

        found, squares = products(streams, len(streams), columns.astype(jnp.float32).T)
        return jnp.transpose(found, (2, 1, 0)), squares.T / streams.shape[-1]
    squares = jnp.mean(jnp.square(streams.astype(jnp.float32)), axis=-1)
    if columns is None:
        return None, squares
    subscripts = "dc,mtd->cmt" if columns.ndim == 2 else "mdc,mtd->cmt"
    found = exact_product(subscripts, columns.astype(jnp.float32), streams)
    return found if columns.ndim == 2 else jnp.sum(found, axis=1), squares


def _measured(small, m, columns):
    """(products, squares) of tokens in one axis, from what `forward` keeps."""
    squares, products = small[:m], small[m:]
    if columns is None:
        return None, squares
    shape = (columns.shape[-1], m) if columns.ndim == 2 else columns.shape[-1:]
    return products.reshape(*shape, -1), squares
