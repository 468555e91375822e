"""Several residual streams, read and mixed with weights of every token.

Streams lie along the leading axis and tokens come last in all small arrays: on a TPU an axis of 4
at the end would be padded to whole tiles.
"""

import jax
import jax.numpy as jnp

from depthjax.kernels.rms_norm import at_least_float32


def stream_products(streams: jax.Array, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Streams [m, ..., D] times columns [m, D, c], one matrix a stream, and their mean squares:
    ([m, c, ...], [m, ...]), in at least fp32.

    A norm in front of the columns is a factor a token, which commutes with the product: so no
    normalised streams are held.
    """
    wide = at_least_float32(streams)
    columns = columns.astype(wide.dtype)
    products = jnp.einsum("mdc,m...d->mc...", columns, wide, precision="highest")
    return products, jnp.mean(wide * wide, axis=-1)


def mix_streams(
    streams: jax.Array, read: jax.Array, transport: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(sum_j read_j H_j [..., D], sum_j transport_tj H_j [m, ..., D]) of streams H [m, ..., D],
    read [m, ...] and transport [m, m, ...], in at least fp32.

    Spelled as sums over streams, which fuse: products of so small matrices would copy the streams.
    """
    wide = at_least_float32(streams)
    mixed = jnp.sum(transport[..., None] * wide, axis=1)
    return jnp.sum(read[..., None] * wide, axis=0), mixed
