"""The text of a compiled XLA program, read into computations, instructions and arrays."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

ITEM_BITS = {
    **dict.fromkeys(("pred", "s8", "u8"), 8),
    **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 4),
    **dict.fromkeys(("s2", "u2"), 2),
    **dict.fromkeys(("s16", "u16", "bf16", "f16"), 16),
    **dict.fromkeys(("s32", "u32", "f32"), 32),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 64),
    **dict.fromkeys(("f8e4m3fn", "f8e5m2", "f8e4m3b11fnuz", "f8e4m3", "f8e3m4", "f8e8m0fnu"), 8),
    "c128": 128,
    "token": 0,
}
_ARRAY = re.compile(r"\b([a-z]+[0-9a-z]*)\[([0-9,]*)\](?:\{([^{}]*)\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-<>]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-<>]+) = (.*)$", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a program: what it holds, and how it lies in memory."""

    dtype: str
    shape: tuple[int, ...]
    layout: str = ""

    @property
    def in_hbm(self) -> bool:
        """False where it is kept on the chip (memory spaces other than the default)."""
        return "S(" not in self.layout

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes in memory, the padding of its tiles included."""
        sizes = list(self.shape)
        order, _, rest = self.layout.partition(":")
        tile = re.match(r"T\((\d+),(\d+)\)", rest)  # tiles of one dimension pad next to nothing
        minor_first = [int(axis) for axis in order.split(",") if axis]
        for axis, size in zip(minor_first, (tile[2], tile[1]) if tile else (), strict=False):
            sizes[axis] = -(-sizes[axis] // int(size)) * int(size)
        return -(-math.prod(sizes) * ITEM_BITS[self.dtype] // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`name = arrays opcode(operands), attributes`. arguments: the text between the brackets."""

    name: str
    arrays: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    root: bool = False

    @property
    def op_name(self) -> str:
        """Where in the source program it comes from ("" where not known)."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def hbm_bytes(self) -> int:
        """Bytes of its result in device memory."""
        return sum(array.bytes for array in self.arrays if array.in_hbm)

    def attribute(self, pattern: str) -> str | None:
        """The first group of a pattern in the attributes; None where it is not there."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else None

    def called(self, *names: str) -> list[str]:
        """Computations under attributes of these names: calls=%f, branch_computations={%f, %g}."""
        found = re.findall(rf"\b(?:{'|'.join(names)})=(\{{[^}}]*\}}|%[\w.\-<>]+)", self.attributes)
        return [name for text in found for name in re.findall(r"%([\w.\-<>]+)", text)]


class Computation:
    """Instructions in order, by name."""

    def __init__(self, name: str):
        self.name = name
        self.instructions: dict[str, Instruction] = {}

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def get(self, name: str) -> Instruction | None:
        return self.instructions.get(name)

    @functools.cached_property
    def root(self) -> Instruction:
        return next(i for i in self if i.root)

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """By position."""
        return {int(i.arguments): i for i in self if i.opcode == "parameter"}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Which instructions read an instruction."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self:
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return found

    def operand(self, instruction: Instruction, index: int) -> Instruction | None:
        """The instruction that makes an operand."""
        names = instruction.operands
        return self.get(names[index]) if index < len(names) else None


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: its computations and the one it starts with."""

    computations: dict[str, Computation]
    entry: Computation
    header: str

    @property
    def instructions(self) -> int:
        """How many instructions there are, in all computations."""
        return sum(len(c.instructions) for c in self.computations.values())


def stated(what: str) -> str:
    """The pattern of what a Pallas kernel says of its cost: "flops" or "bytes_accessed". Quotes
    stand as they are for TPUs and escaped, within a string, for GPUs."""
    quote = r'(?:"|\\22)?'
    return rf"cost_estimate[^{{}}]{{0,12}}\{{[^}}]*?{quote}{what}{quote}:\s*\"?(\d+)"


def parse(text: str) -> Module:
    """Reads `compiled.as_text()`; ValueError where there is no program in it."""
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in _logical_lines(text):
        if current is None or not line[:1].isspace():
            header = _HEADER.match(line)
            if header:
                current = computations[header[2]] = Computation(header[2])
                entry = current if header[1] else entry
            elif line.startswith("}"):
                current = None
            continue
        instruction = _instruction(line)
        if instruction:
            current.instructions[instruction.name] = instruction
    if entry is None:
        raise ValueError("the text holds no HLO program with an ENTRY computation")
    return Module(computations, entry, text.partition("\n")[0])


def _logical_lines(text: str) -> Iterator[str]:
    """Lines, where one that goes on (metadata and kernels may hold line breaks) is whole."""
    held = ""
    for line in text.splitlines():
        begins = (
            _INSTRUCTION.match(line)
            or _HEADER.match(line)
            or line.rstrip() == "}"
            or line.startswith("HloM")
        )
        if begins and held:
            yield held
            held = ""
        held = line if begins or not held else f"{held}\n{line}"
    if held:
        yield held


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text) - 1


def _instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if not found:
        return None
    rest = found[3]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    opening = rest.find("(")
    closing = _closing(rest, opening)
    arguments = rest[opening + 1 : closing]
    return Instruction(
        name=found[2],
        arrays=tuple(arrays_of(kind)),
        opcode=rest[:opening],
        operands=tuple(re.findall(r"%([\w.\-<>]+)", arguments)),
        arguments=arguments,
        attributes=rest[closing + 1 :],
        root=bool(found[1]),
    )


def arrays_of(kind: str) -> Iterator[Array]:
    """The arrays in the text of a type."""
    for dtype, sizes, layout in _ARRAY.findall(kind):
        if dtype in ITEM_BITS:
            yield Array(dtype, tuple(int(n) for n in sizes.split(",") if n), layout)
