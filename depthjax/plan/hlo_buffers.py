"""Which arrays of a compiled program are large, and which it copies."""

import dataclasses
import re

from depthjax.plan.hlo import Module
from depthjax.plan.hlo_cost import executions

_ALIASES = {
    *("tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "parameter"),
    *("dynamic-update-slice", "opt-barrier", "optimization-barrier", "after-all", "domain"),
}


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array in device memory. count: how many of its shape come from the same place."""

    shape: str
    bytes: int
    origin: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.shape} {self.bytes / 2**30:.2f} GiB, {self.origin}"


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy instruction and how often it runs. shape: such as (16, 2, 2048, 1216)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    times: float
    origin: str


def largest_buffers(module: Module, count: int = 3) -> list[Buffer]:
    """The largest arrays that the program is given or makes, in place updates aside; one entry for
    all that have the same shape. Not all of them live at the same time."""
    found: dict[str, list[tuple[int, str]]] = {}
    entry = ((i, True) for i in module.entry if i.opcode == "parameter")
    made = ((run.instruction, False) for run in executions(module)[0])
    for instruction, given in (*entry, *made):
        aliases = instruction.opcode in _ALIASES or instruction.opcode.endswith(
            ("-done", "-update")
        )
        if not given and (aliases or _in_place(module, instruction)):
            continue
        for array in instruction.arrays:
            if array.in_hbm:
                origin = instruction.name.strip("_.0123456789") if given else instruction.op_name
                found.setdefault(str(array), []).append((array.bytes, shortened(origin)))
    buffers = []
    for shape, uses in found.items():
        size, origin = max(uses, key=lambda use: (use[0], use[1] != ""))
        buffers.append(Buffer(shape, size, origin or "unnamed", len(uses)))
    return sorted(buffers, key=lambda buffer: -buffer.bytes)[:count]


def _in_place(module: Module, instruction) -> bool:
    """A fusion whose result is an operand with a part overwritten."""
    if instruction.opcode != "fusion":
        return False
    body = module.computations[instruction.called("calls")[0]]
    root = body.root
    while root.opcode == "bitcast" and body.operand(root, 0) is not None:
        root = body.operand(root, 0)
    return root.opcode in ("dynamic-update-slice", "scatter")


def shortened(op_name: str) -> str:
    """The last parts of where an operation comes from, without transformations' names."""
    text = re.sub(r"\b(jit|jvp|transpose|vmap|checkpoint|eval_jaxpr)\b", "", op_name)
    parts = [re.sub(r"[()]+", "", part) for part in text.split("/")]
    backward = "backward " if "transpose(" in op_name else ""
    names = [
        part for part in parts if part and part not in ("while", "body", "closed_call", "_step")
    ]
    return backward + "/".join(names[-2:])


def copies(module: Module, at_least: int = 0) -> list[Copy]:
    """Every `copy` of at least so many bytes that runs, alone or as a fusion of its own, the most
    bytes in all first. Copies between device memory and the chip's own are not among them."""
    found = []
    for run in executions(module)[0]:
        instruction = run.instruction
        if instruction.opcode not in ("copy", "fusion") or not instruction.arrays:
            continue
        if instruction.opcode == "fusion":
            body = module.computations[instruction.called("calls")[0]]
            if body.root.opcode != "copy":
                continue
        array = instruction.arrays[0]
        if array.in_hbm and array.bytes >= at_least:
            found.append(
                Copy(
                    instruction.name,
                    array.dtype,
                    array.shape,
                    array.bytes,
                    run.times,
                    instruction.op_name,
                )
            )
    return sorted(found, key=lambda copy: -copy.bytes * copy.times)
