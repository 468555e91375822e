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
    where the group is a ring, which is what the links carry; of a permute, on average.
    """

    kind: str
    axes: str
    group: int
    count: float
    payload: float
    sent: float


def collectives(module: Module, mesh: Mapping[str, int], slices: int = 1) -> list[Collective]:
    """Of a program over a mesh with these axes, in order; the most bytes first.

    slices: of a TPU pod, which the first axis crosses. The program is that of one of them; what
    goes to the others, over the network of the data center, is sent by the host.
    """
    first = next(iter(mesh))
    mesh = {**mesh, first: mesh[first] // slices}
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
            share = len(_pairs(instruction)) / devices if kind == "collective-permute" else 1
            sent = payload * _ring(kind, size) * share
            total = found.setdefault((kind, axes, size), np.zeros(3))
            total += run.times * np.array([1.0, payload, sent])
        if kind := _between_slices(run.instruction):
            payload = _payload(run.computation, run.instruction)
            total = found.setdefault((kind, f"{first}, between slices", slices), np.zeros(3))
            total += run.times * np.array([1.0, payload, payload * _ring(kind, slices)])
    listed = [Collective(*key, *map(float, total)) for key, total in found.items()]
    return sorted(listed, key=lambda c: -c.sent)


def permuted_bytes(module: Module, mark: str) -> float:
    """Bytes that one run moves by collective permutes whose names in the source have `mark`: of
    each, the operand once for every pair of devices, as often as it runs. The branches of a
    conditional are taken to run equally often."""
    total = 0.0
    for run in executions(module)[0]:
        for kind, instruction, computation in _inside(module, run.computation, run.instruction):
            if kind == "collective-permute" and mark in instruction.op_name:
                total += run.times * _payload(computation, instruction) * len(_pairs(instruction))
    return total


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


def _between_slices(instruction: Instruction) -> str:
    """The kind of collective that a transfer by the host is a device's part of; "" for others."""
    if instruction.opcode != "send":
        return ""
    kind = instruction.attribute(r'_xla_megascale_transfer_type="(\w+)"')
    return (kind or "").lower().replace("_", "-")


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
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", text)
    iota = re.search(r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?", text)
    listed = re.search(r"replica_groups=\{(\{[0-9,{}]*\})\}", text)
    if named:
        groups = _named_groups(*named.groups())
    elif iota:
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


def _named_groups(mesh: str, axes: str) -> np.ndarray:
    """Groups along the axes `'b','a':(1)2` of a mesh `'a'=4,'b'=2`, whose axes need not be ours;
    the second is the part of size 2 of the axis a, behind a part of size 1."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    parts = {name: [size] for name, size in sizes.items()}
    named = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)
    for name, before, size in named:
        if size:
            parts[name] = [int(before), int(size), sizes[name] // int(before) // int(size)]
    places, shape = {}, []
    for name, sizes_of in parts.items():
        places[name] = len(shape) + (1 if len(sizes_of) > 1 else 0)
        shape += sizes_of
    along = [places[name] for name, *_ in named]
    ids = np.moveaxis(np.arange(math.prod(shape)).reshape(shape), along, range(-len(along), 0))
    return ids.reshape(-1, math.prod(shape[place] for place in along))


def _permuted_axes(instruction: Instruction, mesh: Mapping[str, int]) -> tuple[str, int]:
    """(axes along which senders and receivers differ, devices along them)."""
    pairs, sizes = _pairs(instruction), tuple(mesh.values())
    moved: set[int] = set()
    for pair in pairs:
        if max(pair) >= math.prod(sizes):
            return "other", len(pairs)
        ends = (np.unravel_index(device, sizes) for device in pair)
        moved |= {axis for axis, (a, b) in enumerate(zip(*ends, strict=True)) if a != b}
    names = [name for axis, name in enumerate(mesh) if axis in moved]
    return "+".join(names) or "other", math.prod(mesh[name] for name in names)


def _pairs(permute: Instruction) -> list[tuple[int, int]]:
    """(from, to) of a collective permute."""
    text = permute.attribute(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}") or ""
    return [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", text)]
