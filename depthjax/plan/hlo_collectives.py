"""What devices send one another, counted on a compiled program: by kind, mesh axis and bytes."""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping

import numpy as np

from depthjax.plan.hlo import Computation, Instruction, Module
from depthjax.plan.hlo_cost import executions

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "ragged-all-to-all",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind over one set of devices, in one run of the program.

    axes: mesh axes that the group spans, joined by "+", or "other". group: devices in one group.
    count: how often it runs. payload: bytes that a device puts in. sent: bytes that a device sends
    where the group is a ring, which is what the links carry.
    """

    kind: str
    axes: str
    group: int
    count: float
    payload: float
    sent: float


def collectives(module: Module, mesh: Mapping[str, int]) -> list[Collective]:
    """Of a program over a mesh with these axes, in order; the most bytes first."""
    devices = math.prod(mesh.values())
    known = _groups_by_axes(mesh)
    found: dict[tuple, np.ndarray] = {}
    for run in executions(module)[0]:
        for kind, instruction, computation in _inside(module, run.computation, run.instruction):
            if kind == "collective-permute":
                axes, size = _permuted_axes(instruction, mesh)
            else:
                axes, size = _group(instruction, mesh, devices, known)
            payload = _payload(computation, instruction)
            sent = payload * _ring(kind, size)
            total = found.setdefault((kind, axes, size), np.zeros(3))
            total += run.times * np.array([1.0, payload, sent])
    listed = [Collective(*key, *map(float, total)) for key, total in found.items()]
    return sorted(listed, key=lambda c: -c.sent)


def _inside(module: Module, computation: Computation, instruction: Instruction):
    """(kind, collective, its computation) of an instruction, or of what is fused into it."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in KINDS:
        yield opcode, instruction, computation
    elif opcode == "fusion":
        for name in instruction.called("calls"):
            inner = module.computations[name]
            for fused in inner:
                for kind, *rest in _inside(module, inner, fused):
                    # A TPU's reduce-scatter is an all-reduce that keeps one slice, in one fusion.
                    scatter = kind == "all-reduce" and name.startswith("all-reduce-scatter")
                    yield ("reduce-scatter" if scatter else kind), *rest


def _payload(computation: Computation, instruction: Instruction) -> int:
    """Bytes of the operands, without the padding of tiles."""
    made = (computation.get(name) for name in instruction.operands)
    arrays = [array for one in made if one is not None for array in one.arrays]
    return sum(dataclasses.replace(array, layout="").bytes for array in arrays)


def _ring(kind: str, size: int) -> float:
    """Bytes a device sends in a ring of `size`, a byte of payload."""
    if kind == "all-reduce":
        return 2 * (size - 1) / size
    if kind in ("reduce-scatter", "all-to-all", "ragged-all-to-all"):
        return (size - 1) / size
    if kind == "all-gather":
        return size - 1.0
    return 1.0


def _groups_by_axes(mesh: Mapping[str, int]) -> dict[frozenset, str]:
    """The groups that collectives over each set of axes have -> the axes' names."""
    ids = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    names, found = list(mesh), {}
    for count in range(len(names), 0, -1):
        for axes in itertools.combinations(range(len(names)), count):
            groups = np.moveaxis(ids, axes, range(-count, 0)).reshape(
                -1, math.prod(ids.shape[axis] for axis in axes)
            )
            # Axes of size 1 add nothing: the fewest names that make these groups are the last.
            found[_as_sets(groups)] = "+".join(names[axis] for axis in axes)
    return found


def _as_sets(groups) -> frozenset:
    return frozenset(frozenset(int(device) for device in group) for group in groups)


def _group(
    instruction: Instruction, mesh: Mapping[str, int], devices: int, known: Mapping[frozenset, str]
) -> tuple[str, int]:
    """(axes, devices in a group) of a collective."""
    text = instruction.attributes
    named = re.search(r"replica_groups=mesh\[[^\]]*\] \{([^}]*)\}", text)
    if named:
        axes = re.findall(r"'([^']+)'", named[1])
        if all(axis in mesh for axis in axes):
            return "+".join(axes), math.prod(mesh[axis] for axis in axes)
    iota = re.search(r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?", text)
    listed = re.search(r"replica_groups=\{(\{[0-9,{}]*\})\}", text)
    if iota:
        shape, sizes, order = (
            [int(n) for n in (part or "").split(",") if n] for part in iota.groups()
        )
        ids = np.arange(math.prod(sizes)).reshape(sizes)
        groups = (ids.transpose(order) if order else ids).reshape(shape)
    elif listed:
        groups = [
            [int(n) for n in part.split(",")] for part in re.findall(r"\{([0-9,]+)\}", listed[1])
        ]
    else:
        groups = np.arange(devices).reshape(1, -1)
    return known.get(_as_sets(groups), "other"), len(groups[0])


def _permuted_axes(instruction: Instruction, mesh: Mapping[str, int]) -> tuple[str, int]:
    """(axes along which senders and receivers differ, devices along them)."""
    text = instruction.attribute(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}") or ""
    pairs = re.findall(r"\{(\d+),(\d+)\}", text)
    sizes = tuple(mesh.values())
    moved: set[int] = set()
    for source, target in pairs:
        if max(int(source), int(target)) >= math.prod(sizes):
            return "other", len(pairs)
        ends = (np.unravel_index(int(device), sizes) for device in (source, target))
        moved |= {axis for axis, (a, b) in enumerate(zip(*ends, strict=True)) if a != b}
    names = [name for axis, name in enumerate(mesh) if axis in moved]
    return "+".join(names) or "other", math.prod(mesh[name] for name in names)
