"""How the branches lay out the tokens of a batch for their products with matrices."""

import jax

from depthjax.kernels.over_mesh import SEQUENCE, dividing, platform


def merge_tokens(x: jax.Array) -> jax.Array:
    """x [B, T, ...]; on a CPU as [B T, ...].

    A matrix's gradient sums over B and T. XLA's CPU compiler copies the operands to make that one
    axis, number by number, and takes longer over it than over the product. Not where a mesh divides
    the tokens, which could not be one axis with the batch then.
    """
    merge = platform() == "cpu" and not dividing(x.shape[1], (SEQUENCE,))
    return x.reshape(-1, *x.shape[2:]) if merge else x
