"""Running an array function on each device's part of a batch."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

BATCH_AXES = ("data", "fsdp")
"""Mesh axes that divide a batch, by the names that the library gives them."""


def batch_axes(batch: int) -> tuple[str, ...]:
    """Axes of the mesh in force (`jax.set_mesh`) that divide a batch of `batch` rows: none without
    a mesh, where the rows do not go round, or where the caller runs on one device's part already.
    """
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    axes = tuple(a for a in BATCH_AXES if types.get(a) == jax.sharding.AxisType.Auto)
    shards = 1
    for axis in axes:
        shards *= mesh.shape[axis]
    return axes if shards > 1 and batch % shards == 0 else ()


def over_batch(function: Callable, batch: int, in_specs: Any, out_specs: Any) -> Callable:
    """`function(axes, *arrays)` on each device's rows; axes: the mesh axes that hold the others.

    in_specs, out_specs: pytrees of bool beside the arguments and results, True where the leading
    axis is the batch; False where each device sees the whole, and has to return the same (sum over
    `axes`). Where `batch_axes` finds none, the function is called once, with ().
    """
    axes = batch_axes(batch)
    if not axes:
        return lambda *arrays: function((), *arrays)
    spec = {True: P(axes), False: P()}
    in_specs, out_specs = jax.tree.map(spec.get, (in_specs, out_specs))
    return jax.shard_map(
        lambda *arrays: function(axes, *arrays),
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(axes),
        check_vma=False,  # kernels do not say what varies
    )
