"""The mesh that `--mesh auto` chooses, by formula."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from depthjax.config import Config
from depthjax.data import load_tokenizer
from depthjax.errors import InputError
from depthjax.parallel import mesh_sizes
from depthjax.plan.chips import chip_of_kind
from depthjax.plan.info import parameter_counts
from depthjax.plan.memory import training_bytes

ROOM = 0.9
"""Share of a device's memory that the formulas may fill; they know no temporaries."""


def with_mesh(config: Config, devices: Sequence[Any]) -> Config:
    """The config with its mesh spelt out for `devices` where `mesh.auto` asks for that.

    Of the meshes that work, with sequence and stage as they are given: the first that fits, going
    from the one that sends least, all devices along data, to more fsdp and then more tensor; where
    none fits, the one that holds least. A device of unknown memory fits anything.
    """
    if not config.mesh.auto:
        return config
    for axis in ("sequence", "stage"):
        size = getattr(config.mesh, axis)
        if size < 1:
            raise InputError(
                f"mesh.{axis} is {size}, but mesh.auto chooses data, fsdp and tensor alone: give 1 "
                "or more"
            )
    chosen_here = {"data": -1, "fsdp": 1, "tensor": 1}
    for axis, unset in chosen_here.items():
        size = getattr(config.mesh, axis)
        if size != unset:
            raise InputError(
                f"mesh.{axis} is {size}, but mesh.auto chooses it: leave out one of them"
            )
    usable = _usable(devices[0])
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    fixed = config.mesh.sequence * config.mesh.stage
    choices = []
    for tensor in _divisors(len(devices)):
        for fsdp in _divisors(len(devices) // tensor):
            mesh = dataclasses.replace(config.mesh, data=-1, fsdp=fsdp, tensor=tensor, auto=False)
            chosen = dataclasses.replace(config, mesh=mesh)
            if (len(devices) // (tensor * fsdp)) % fixed == 0 and _works(chosen, devices, slices):
                choices.append(chosen)
    if not choices:
        mesh_sizes(config, len(devices), slices)  # says why
        raise InputError(f"mesh is auto, but no mesh of {len(devices)} devices works: give one")
    if usable is None:
        return choices[0]
    vocab = config.model.vocab or load_tokenizer(config.data.tokenizer).vocab_size
    parameters = sum(parameter_counts(config, vocab).values())
    held = [bytes_on_a_device(choice, vocab, parameters, len(devices)) for choice in choices]
    fitting = [choice for choice, n in zip(choices, held, strict=True) if n <= ROOM * usable]
    return fitting[0] if fitting else choices[held.index(min(held))]


def bytes_on_a_device(config: Config, vocab: int, parameters: int, devices: int) -> float:
    """Parameters, optimizer and gradient, and what one micro-batch keeps for the backward pass:
    depth state, inputs of the layers, and without rematerialisation what is within them."""
    mesh, shape = config.mesh, config.shape
    held = training_bytes(config, vocab, parameters)
    states = held.parameters + held.optimizer + held.gradient
    token = held.depth_state_per_token + held.layer_inputs_per_token
    if config.model.remat in ("none", "dots"):
        heads = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
        within = shape.layers * (4 * shape.width + heads + 3 * shape.mlp_width)
        token += within * jnp.dtype(config.model.dtype).itemsize
    ways = devices // (mesh.fsdp * mesh.tensor * mesh.sequence * mesh.stage) * mesh.fsdp
    rows = config.train.batch // config.train.accumulate / ways
    tokens = rows * config.model.context / (mesh.sequence * mesh.tensor)
    return states / (mesh.fsdp * mesh.tensor * mesh.stage) + tokens * token


def _works(config: Config, devices: Sequence[Any], slices: int) -> bool:
    try:
        mesh_sizes(config, len(devices), slices)
    except InputError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _usable(device: Any) -> int | None:
    """Bytes that a program may use on a device; None where not known, as of a CPU."""
    chip = chip_of_kind(device.device_kind)
    return chip and chip.usable
