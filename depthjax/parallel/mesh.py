"""The mesh of a config: its sizes filled in and checked, and its devices in order."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from depthjax.config import Config
from depthjax.errors import InputError
from depthjax.kernels.over_mesh import BATCH_AXES

AXES = ("data", "stage", "fsdp", "sequence", "tensor")
"""From the axis that says least, and may cross from slice to slice, to the one that says most."""


def make_mesh(
    config: Config, devices: Sequence[Any] | None = None, tokens: int | None = None
) -> Mesh:
    """The mesh of `config.mesh` over `devices` (None: all), every axis of AXES in it, of automatic
    type. TPU slices differ along `data`. tokens: as in
    `mesh_sizes`, and InputError too."""
    devices = jax.devices() if devices is None else list(devices)
    shape = tuple(mesh_sizes(config, len(devices), _slices(devices), tokens).values())
    return Mesh(arranged(devices, shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def batch_ways(mesh: Mesh) -> int:
    """Devices among which a batch is divided."""
    return math.prod(mesh.shape.get(axis, 1) for axis in BATCH_AXES)


def _slices(devices: Sequence[Any]) -> int:
    return len({getattr(device, "slice_index", 0) for device in devices})


def arranged(devices: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    """The devices as an array of this shape: neighbours along an axis are so on the network, and
    slices differ along the first."""
    slices = _slices(devices)
    options = {"devices": devices, "allow_split_physical_axes": True}
    if slices == 1:
        return mesh_utils.create_device_mesh(shape, **options)
    within, across = (shape[0] // slices, *shape[1:]), (slices, *[1] * (len(shape) - 1))
    return mesh_utils.create_hybrid_device_mesh(within, across, **options)


def mesh_sizes(
    config: Config, devices: int, slices: int = 1, tokens: int | None = None
) -> dict[str, int]:
    """Devices along each of AXES, -1 filled in.

    tokens: how many of each sequence a program of inference computes, whose batch fits any mesh;
    None: the training of the config.

    Raises InputError where they are not `devices` in all, do not divide what they are to divide, or
    leave a slice apart along another axis than data; it names the nearest mesh that works.
    """
    given = {axis: getattr(config.mesh, axis) for axis in AXES}
    for axis, size in given.items():
        if size < 1 and size != -1:
            raise InputError(f"mesh.{axis} is {size}: give 1 or more, or -1 for what is left")
    left = [axis for axis, size in given.items() if size == -1]
    if len(left) > 1 and "data" in left:  # its default: another axis takes what is left
        given["data"] = 1
        left.remove("data")
    if len(left) > 1:
        both = " and ".join(f"mesh.{axis}" for axis in left)
        raise InputError(f"{both} are both -1: only one of them can be what is left")
    known = math.prod(size for size in given.values() if size != -1)
    sizes = {axis: max(devices // known, 1) if n == -1 else n for axis, n in given.items()}
    check = functools.partial(_trouble, config, devices, slices, tokens)
    trouble = check(sizes)
    if trouble is None:
        if sizes["stage"] > 1 and config.run.depth_sizes:
            raise InputError(
                f"run.depth_sizes is true, but with mesh.stage {sizes['stage']} no device sees the "
                "whole depth: leave it out, or take mesh.stage 1"
            )
        return sizes
    remedy = f"no mesh of {devices} devices works for this config, take another number of them"
    fewer = _with_fewer_passes(config, sizes["stage"])
    if _trouble(fewer, devices, slices, tokens, sizes) is None:
        config, near = fewer, sizes
    else:
        near = _nearest(sizes, devices, check)
    if near is not None:
        text = mesh_text(near) + _pipeline_text(config, near["stage"])
        remedy = f"the nearest that works is --mesh {text}"
    raise InputError(f"mesh is {mesh_text(sizes)}, {trouble}: {remedy}")


def mesh_text(sizes: Mapping[str, int]) -> str:
    """`data=2,fsdp=4`, without the axes of one device."""
    named = {axis: size for axis, size in sizes.items() if size > 1 or axis == "data"}
    return ",".join(f"{axis}={size}" for axis, size in named.items())


def _with_fewer_passes(config: Config, stages: int) -> Config:
    """The config with no more passes of so many stages than it has layers for."""
    passes = max(min(config.mesh.virtual_stages, config.shape.layers // stages), 1)
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, virtual_stages=passes))


def _pipeline_text(config: Config, stages: int) -> str:
    """What `--mesh` has to say besides, as it takes the rest from no config."""
    given, named = config.mesh, ""
    if stages > 1 and given.virtual_stages > 1:
        named += f",virtual_stages={given.virtual_stages}"
    if stages > 1 and given.microbatches is not None:
        named += f",microbatches={given.microbatches}"
    return named


def _trouble(
    config: Config, devices: int, slices: int, tokens: int | None, sizes: dict[str, int]
) -> str | None:
    """Why these sizes do not work, as the rest of a sentence that began with them."""
    total = math.prod(sizes.values())
    if total != devices:
        return f"which makes {total} devices of the {devices} that there are"
    if sizes["data"] % slices:
        return f"but data has to be a multiple of the {slices} slices"
    rows, shared = sizes["data"] * sizes["fsdp"], sizes["sequence"] * sizes["tensor"]
    shape, stages, virtual = config.shape, sizes["stage"], config.mesh.virtual_stages
    micro = config.train.batch // config.train.accumulate if tokens is None else 0
    pieces = 1 if stages == 1 else config.mesh.microbatches or stages
    if stages * virtual > shape.layers:
        return f"but stage * virtual_stages = {stages * virtual} is more than {shape.layers} layers"
    tokens = config.model.context if tokens is None else tokens
    for axes, ways, number, what in (
        ("data * fsdp", rows, micro, "sequences of a micro-batch (train.batch)"),
        ("sequence * tensor", shared, 0 if tokens == 1 else tokens, "tokens of a sequence"),
        ("sequence * tensor", shared, shape.heads, "heads"),
        ("sequence * tensor", shared, shape.kv_heads, "key-value heads"),
        ("tensor", sizes["tensor"], shape.mlp_width, "columns of the MLP"),
        ("stage", stages, 0 if pieces == 1 else pieces, "mesh.microbatches"),
        ("data * fsdp * microbatches", rows * pieces, micro, "sequences of a micro-batch"),
    ):
        if number % ways:
            return f"but {axes} = {ways} does not divide the {number} {what}"
    return None


def _nearest(
    sizes: dict[str, int], devices: int, check: Callable[[dict[str, int]], str | None]
) -> dict[str, int] | None:
    """The mesh without trouble whose sizes differ least from `sizes`, by factors."""

    def distance(other: dict[str, int]) -> tuple[float, tuple[int, ...]]:
        # The data axis is what is left, and a pipeline is not entered into lightly.
        weights = {"data": 0.5, "stage": 2.0}
        steps = (abs(math.log2(other[a] / sizes[a])) * weights.get(a, 1.0) for a in AXES)
        return sum(steps), tuple(other[a] for a in AXES)

    meshes = (dict(zip(AXES, ways, strict=True)) for ways in _factorings(devices, len(AXES)))
    return min((mesh for mesh in meshes if check(mesh) is None), key=distance, default=None)


def _factorings(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as an ordered product of so many."""
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factorings(number // first, parts - 1):
                yield (first, *rest)
