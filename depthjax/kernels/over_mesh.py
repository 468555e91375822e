"""Running an array function on each device's part, and for which platform, by the mesh in force."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

DATA, FSDP, STAGE, SEQUENCE, TENSOR = "data", "fsdp", "stage", "sequence", "tensor"
BATCH_AXES = (DATA, FSDP, STAGE)
"""Mesh axes that divide a batch: the stages of a pipeline do outside of it."""
TOKEN_AXES = (SEQUENCE, TENSOR)
"""Mesh axes that divide the tokens of a sequence between two branches."""
HEAD_AXES = (TENSOR, SEQUENCE)
"""Mesh axes that divide the heads while attention looks along the sequence."""
FLAT = -1
"""In place of an axis, to `over_batch`: the first, along which a device has all of its tokens."""


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
    return dividing(batch, BATCH_AXES)


def dividing(size: int, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `axes` that the mesh in force has and the compiler is free to use, where together
    they divide `size`; else none."""
    sizes = free_axes()
    axes = tuple(axis for axis in axes if sizes.get(axis, 1) > 1)
    return axes if axes and size % math.prod(sizes[axis] for axis in axes) == 0 else ()


def free_axes() -> dict[str, int]:
    """Sizes of the mesh axes that the compiler is free to use."""
    return _axes_of(jax.sharding.AxisType.Auto)


def _axes_of(wanted: jax.sharding.AxisType) -> dict[str, int]:
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, kind in kinds if kind == wanted}


def frees_axes(like: str, *results: tuple[int, bool] | None, lead: int = 1) -> Callable:
    """Decorates a function of arrays for meshes with Explicit axes, as `jax.make_mesh` makes them:
    inside, the compiler is free to use them, and results are divided as the argument `like`.

    lead: axes of that argument in front of its tokens, if it is no list of arrays [..., D];
    results: for each, the number of its axes in front of the tokens, which are not divided, and
    whether a width follows the tokens; None: all of it is whole on every device.
    """

    def decorate(function):
        signature = inspect.signature(function)

        @functools.wraps(function)
        def run(*args, **kwargs):
            explicit = tuple(_axes_of(jax.sharding.AxisType.Explicit))
            if not explicit:
                return function(*args, **kwargs)
            tokens = signature.bind(*args, **kwargs).arguments[like]
            first, front = jax.tree.leaves(tokens)[:1], lead if hasattr(tokens, "ndim") else 0
            if not first:
                return function(*args, **kwargs)  # which refuses an empty list
            spec = jax.typeof(first[0]).sharding.spec[front:]

            def divided(front, has_width):
                return P(*[None] * front, *spec[: len(spec) - (not has_width)])

            specs = tuple(P() if axes is None else divided(*axes) for axes in results)
            leaves, tree = jax.tree.flatten((args, kwargs))
            places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

            def call(*arrays):
                given = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
                args, kwargs = jax.tree.unflatten(tree, given.values())
                return function(*args, **kwargs)

            out = specs if len(specs) > 1 else specs[0]
            free = jax.sharding.auto_axes(call, axes=explicit, out_sharding=out)
            return free(*(leaves[place] for place in places))

        return run

    return decorate


def over_batch(
    function: Callable,
    batch: int,
    in_axes: Any,
    out_axes: Any,
    *,
    length: int | None = None,
    kernel: bool = False,
) -> Callable:
    """`function(axes, *arrays)` on each device's tokens; axes: the mesh axes that hold the others.

    in_axes, out_axes: pytrees beside the arguments and results of the axis that is the batch, or
    FLAT; None where each device sees the whole, and has to return the same (sum over `axes`); or a
    PartitionSpec of its own.
    length: where it is given, the axis after the batch's is a sequence of so many tokens, which is
    divided too. kernel: a kernel runs between two branches, which the compiler cannot divide, so
    that devices along other axes of the mesh do the same work; else `tensor` is left to the
    compiler. Where nothing divides the work, the function is called once, with ().
    """
    rows, sizes = batch_axes(batch), free_axes()
    along = dividing(length, TOKEN_AXES if kernel else (SEQUENCE,)) if length else ()
    axes = rows + along
    manual = set(sizes) if kernel and math.prod(sizes.values()) > 1 else set(axes)
    if not manual:
        return lambda *arrays: function((), *arrays)

    def spec(axis):
        if axis is None or isinstance(axis, P):
            return axis or P()
        if axis == FLAT:
            return P(axes)
        return P(*[None] * axis, rows or None, *([along] if along else []))

    in_specs, out_specs = jax.tree.map(
        spec, (in_axes, out_axes), is_leaf=lambda axis: axis is None or isinstance(axis, P)
    )
    return jax.shard_map(
        lambda *arrays: function(axes, *arrays),
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=manual,
        check_vma=False,  # kernels do not say what varies
    )


def tokens_of(x: jax.Array, axis: int) -> tuple[int, int | None]:
    """(batch, length) of an array [..., B, T, ..., D] whose batch is at `axis`, as `over_batch`
    takes them: 1 and None where it has no such axes."""
    sizes = x.shape[axis:-1]
    return (sizes[0] if sizes else 1), (sizes[1] if len(sizes) > 1 else None)


def over_tokens(function: Callable, rows: jax.Array, in_axes: Any, out_axes: Any) -> Callable:
    """`over_batch` of a kernel for the tokens of rows [N, B, ..., D]."""
    batch, length = tokens_of(rows, 1)
    return over_batch(function, batch, in_axes, out_axes, length=length, kernel=True)


def over_rows_and_heads(function: Callable, batch: int, heads: int) -> Callable:
    """`function` of arrays [B, T, H, ...], which returns such arrays, on each device's rows and
    heads: for kernels, which the compiler cannot divide. Devices along other axes of the mesh do
    the same work. heads: the smallest number of heads among the arrays."""
    sizes = free_axes()
    if math.prod(sizes.values()) == 1:
        return function
    spec = P(batch_axes(batch) or None, None, dividing(heads, HEAD_AXES) or None)
    return jax.shard_map(
        function, in_specs=spec, out_specs=spec, axis_names=set(sizes), check_vma=False
    )
