"""Running an array function on each device's part, and for which platform, by the mesh in force."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

BATCH_AXES, HEADS_AXIS = ("data", "fsdp"), "tensor"
"""Mesh axes that divide a batch, and the heads of attention."""


def platform() -> str:
    """ "tpu", "gpu" or "cpu": that of the mesh in force (`jax.set_mesh`), which may be a described
    one to compile for, else of this process's devices."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device is not None else jax.default_backend()


def batch_axes(batch: int) -> tuple[str, ...]:
    """Axes of the mesh in force (`jax.set_mesh`) that divide a batch of `batch` rows: none without
    a mesh, where the rows do not go round, or where the caller runs on one device's part already.
    """
    sizes = _free_axes()
    axes = tuple(axis for axis in BATCH_AXES if axis in sizes)
    shards = math.prod(sizes[axis] for axis in axes)
    return axes if shards > 1 and batch % shards == 0 else ()


def _free_axes() -> dict[str, int]:
    """Sizes of the mesh axes that the compiler is free to use."""
    mesh = jax.sharding.get_abstract_mesh()
    return {
        name: mesh.shape[name]
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == jax.sharding.AxisType.Auto
    }


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


def over_rows_and_heads(function: Callable, batch: int, heads: int) -> Callable:
    """`function` of arrays [B, T, H, ...], which returns such arrays, on each device's rows and
    heads: for kernels, which the compiler cannot divide. Devices along other axes of the mesh do
    the same work. heads: the smallest number of heads among the arrays."""
    sizes = _free_axes()
    if math.prod(sizes.values()) == 1:
        return function
    by_head = heads % sizes.get(HEADS_AXIS, heads + 1) == 0
    spec = P(batch_axes(batch) or None, None, HEADS_AXIS if by_head else None)
    return jax.shard_map(
        function, in_specs=spec, out_specs=spec, axis_names=set(sizes), check_vma=False
    )
