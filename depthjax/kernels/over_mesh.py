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


def device_kind() -> str:
    """The name of a device of that platform, as "NVIDIA H100 80GB HBM3"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None else jax.devices()[0].device_kind


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


def over_batch(
    function: Callable, batch: int, in_axes: Any, out_axes: Any, *, kernel: bool = False
) -> Callable:
    """`function(axes, *arrays)` on each device's rows; axes: the mesh axes that hold the others.

    in_axes, out_axes: pytrees beside the arguments and results of the axis that is the batch, None
    where each device sees the whole, and has to return the same (sum over `axes`). kernel: a kernel
    runs, which the compiler cannot divide, so that devices along other axes of the mesh do the same
    work. Where nothing divides the work, the function is called once, with ().
    """
    axes, sizes = batch_axes(batch), _free_axes()
    manual = set(sizes) if kernel and math.prod(sizes.values()) > 1 else set(axes)
    if not manual:
        return lambda *arrays: function((), *arrays)

    def spec(axis):
        return P() if axis is None or not axes else P(*[None] * axis, axes)

    in_specs, out_specs = jax.tree.map(spec, (in_axes, out_axes), is_leaf=lambda axis: axis is None)
    return jax.shard_map(
        lambda *arrays: function(axes, *arrays),
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=manual,
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
