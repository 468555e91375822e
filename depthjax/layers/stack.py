"""Layers of one shape, stacked along a leading axis so that one scan body serves them all."""

from collections.abc import Callable

from flax import nnx


def stack(make: Callable[[nnx.Rngs], nnx.Module], layers: int, rngs: nnx.Rngs) -> nnx.Module:
    """`layers` modules of one kind as one module: each parameter gains a leading axis [L, ...]."""

    @nnx.split_rngs(splits=layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def build(rngs):
        return make(rngs)

    return build(rngs)
