"""Bytes between device memory and the chip, counted on a compiled program.

An instruction outside of fusions reads its operands and writes its result; what lies on the chip
(VMEM) is free, a slice touches what it takes, and an update in place what it puts. A kernel written
by hand moves what it states (`pl.CostEstimate`), less the operands and results that lie on the
chip; one that states nothing its operands and results, once each, also where one array is several
operands.
"""

import collections

from depthjax.plan.hlo import Computation, Instruction, Module, stated
from depthjax.plan.hlo_cost import executions

_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "domain"),
    *("partition-id", "replica-id", "opt-barrier", "optimization-barrier", "add-dependency"),
}
_SLICES = ("dynamic-slice", "slice", "gather")


def hbm_bytes(module: Module) -> float:
    """Of one run of the program."""
    return sum(traffic_by_opcode(module).values())


def traffic_by_opcode(module: Module) -> dict[str, float]:
    """The same by kind of instruction, the largest first."""
    found: collections.Counter[str] = collections.Counter()
    for run in executions(module)[0]:
        found[run.instruction.opcode] += run.times * traffic(
            module, run.computation, run.instruction
        )
    return dict(found.most_common())


def traffic(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Bytes of device memory that one run of an instruction reads and writes."""
    opcode = instruction.opcode
    free = opcode in _FREE or opcode.endswith(("-done", "-update"))  # a start counts it all
    if free or "AllocateBuffer" in instruction.attributes:
        return 0
    if opcode in ("broadcast", "iota"):
        return instruction.hbm_bytes
    if opcode in ("copy-start", "slice-start", "dynamic-slice-start"):
        return _moved(computation, instruction)
    operands = [computation.get(name) for name in instruction.operands]
    sizes = [0 if made is None else made.hbm_bytes for made in operands]
    if opcode in _SLICES:
        taken = _bytes(instruction)
        return (taken if sizes and sizes[0] else 0) + instruction.hbm_bytes + sum(sizes[1:])
    if opcode == "dynamic-update-slice" and len(operands) > 1:
        put = _bytes(operands[1])
        return sizes[1] + (put if instruction.hbm_bytes else 0)
    if opcode == "scatter":  # reads and writes the rows that it changes
        return sum(sizes[1:]) + 2 * sizes[-1]
    if opcode in ("fusion", "fusion-start"):
        body = module.computations[instruction.called("calls")[0]]
        read = sum(
            min(size, _touched(module, body, body.parameters[index]))
            for index, size in enumerate(sizes)
            if size
        )
        return read + _written(module, body, instruction)
    if opcode == "custom-call":
        if moved := instruction.attribute(stated("bytes_accessed")):
            ends = sum(map(_bytes, (*operands, instruction)))
            return max(0, int(moved) - (ends - sum(sizes) - instruction.hbm_bytes))
        sizes = dict(zip(instruction.operands, sizes, strict=True)).values()
    return sum(sizes) + instruction.hbm_bytes


def _bytes(instruction: Instruction | None) -> int:
    """Of the result, wherever it lies."""
    return 0 if instruction is None else sum(array.bytes for array in instruction.arrays)


def _moved(computation: Computation, start: Instruction) -> int:
    """An asynchronous copy or slice: read and written once, where the ends are in memory."""
    source = computation.operand(start, 0)
    results = [array for array in start.arrays if array.dtype not in ("u32", "s32") or array.shape]
    # copy-start gives (destination, source, context), slice-start ((source), destination, context)
    target = results[0 if start.opcode == "copy-start" else min(1, len(results) - 1)]
    from_memory = source is None or source.hbm_bytes > 0
    return target.bytes * (from_memory + target.in_hbm)


def _touched(
    module: Module, body: Computation, value: Instruction, outside: tuple | None = None
) -> int:
    """How much of a value the fused instructions read. outside: (computation, fusion, outside) of
    a fusion within a fusion, which may hand the value on."""
    total = 0
    if value.root:
        total = _bytes(value) if outside is None else _touched(module, *outside)
    for user in body.users.get(value.name, []):
        if user.opcode == "bitcast":
            total += _touched(module, body, user, outside)
        elif user.opcode in _SLICES and user.operands[0] == value.name:
            total += _bytes(user)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
            continue
        elif user.opcode == "fusion":
            inner = module.computations[user.called("calls")[0]]
            places = (i for i, name in enumerate(user.operands) if name == value.name)
            here = (body, user, outside)
            total += sum(_touched(module, inner, inner.parameters[place], here) for place in places)
        else:
            return _bytes(value)
        if total >= _bytes(value):
            return _bytes(value)
    return total


def _written(module: Module, body: Computation, fusion: Instruction) -> int:
    """What a fusion writes to device memory."""
    root = body.root
    if fusion.opcode == "fusion-start":  # its type holds the operands as well
        return _put(module, body, root)
    parts = [body.get(name) for name in root.operands] if root.opcode == "tuple" else [root]
    total = 0
    for array, part in zip(fusion.arrays, parts, strict=False):
        if array.in_hbm:
            total += min(array.bytes, _put(module, body, part))
    return total


def _put(module: Module, body: Computation, made: Instruction | None) -> int:
    """How much of its result an instruction that may work in place writes."""
    if made is None:
        return 0
    if made.opcode in ("bitcast", "copy") and made.operands:
        inner = body.operand(made, 0)
        if inner is not None and made.opcode == "bitcast":
            return _put(module, body, inner)
    if made.opcode == "dynamic-update-slice":
        return _bytes(body.operand(made, 1))
    if made.opcode == "scatter":
        return _bytes(body.get(made.operands[-1]))
    if made.opcode == "fusion":
        inner = module.computations[made.called("calls")[0]]
        if inner.root.opcode != "tuple":
            return _put(module, inner, inner.root)
    return _bytes(made)
