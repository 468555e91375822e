"""How often each instruction of a compiled program runs, and the FLOPs of its products.

XLA's own cost analysis counts the body of a loop once; here it counts as often as it runs. Of the
arms of a conditional, of which one runs at a time, each counts its share: all alike.
"""

import dataclasses
import functools
import json
import math
import re

import numpy as np

from depthjax.plan.hlo import Computation, Instruction, Module, stated


@dataclasses.dataclass(frozen=True)
class Execution:
    """An instruction outside of fusions, and how often it runs in one run of the program."""

    instruction: Instruction
    computation: Computation
    times: float


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of products (a multiply-add counts 2).

    matmul: products of two matrices, batched or not. vector: products where one side has no axis
    of its own (dot products, weighted sums). kernels: what custom kernels say of themselves.
    attention: kernels of attention that say nothing, by formula: half the square, as causal.
    silent_kernels: other custom kernels that say nothing.
    """

    matmul: float = 0.0
    vector: float = 0.0
    kernels: float = 0.0
    attention: float = 0.0
    silent_kernels: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        return sum(self._counts)

    @property
    def _counts(self) -> tuple[float, ...]:
        return self.matmul, self.vector, self.kernels, self.attention

    def __add__(self, other: "Flops") -> "Flops":
        silent = tuple(dict.fromkeys(self.silent_kernels + other.silent_kernels))
        pairs = zip(self._counts, other._counts, strict=True)
        return Flops(*(a + b for a, b in pairs), silent)

    def __mul__(self, times: float) -> "Flops":
        return Flops(*(count * times for count in self._counts), self.silent_kernels)


_WRAPPERS = ("call", "async-start", "call-start", "custom-call-start")


def executions(module: Module) -> tuple[list[Execution], list[str]]:
    """All that runs, and the names of loops whose trip count cannot be read (they count once)."""
    found: list[Execution] = []
    unknown: list[str] = []

    def walk(computation: Computation, times: float) -> None:
        for instruction in computation:
            if instruction.opcode == "while":
                trips = trip_count(module, computation, instruction)
                if trips is None:
                    unknown.append(instruction.name)
                for body in instruction.called("body"):
                    walk(module.computations[body], times * (1 if trips is None else trips))
            elif instruction.opcode == "conditional":
                arms = instruction.called(
                    "branch_computations", "true_computation", "false_computation"
                )
                for arm in arms:
                    walk(module.computations[arm], times / len(arms))
            elif instruction.opcode in _WRAPPERS:
                for inner in instruction.called("to_apply", "calls", "called_computations"):
                    walk(module.computations[inner], times)
            else:
                found.append(Execution(instruction, computation, times))

    walk(module.entry, 1.0)
    return found, unknown


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often a while loop runs: as the compiler says, or as its condition `i < n` does."""
    stated = loop.attribute(r'known_trip_count"?:\s*\{\s*"?n"?:\s*"?(\d+)')
    if stated:
        return int(stated)
    condition = module.computations[loop.called("condition")[0]]
    root = condition.root
    direction = root.attribute(r"direction=(\w+)")
    if root.opcode != "compare" or direction not in ("LT", "GT", "LE", "GE"):
        return None
    counter, limit = condition.operand(root, 0), condition.operand(root, 1)
    if direction in ("GT", "GE"):
        counter, limit = limit, counter
    end = _constant(condition, limit)
    if end is None or counter is None or counter.opcode != "get-tuple-element":
        return None
    index = int(counter.attribute(r"index=(\d+)") or 0)
    start = computation.operand(loop, 0)
    first = computation.operand(start, index) if start and start.opcode == "tuple" else None
    begin = _constant(computation, first)
    return max(end - (begin or 0) + (direction in ("LE", "GE")), 0)


def _constant(computation: Computation, instruction: Instruction | None) -> int | None:
    while instruction is not None and instruction.opcode in ("copy", "bitcast"):
        instruction = computation.operand(instruction, 0)
    if instruction is None or instruction.opcode != "constant":
        return None
    return int(instruction.arguments) if re.fullmatch(r"-?\d+", instruction.arguments) else None


def flops(module: Module, computation: Computation, instruction: Instruction) -> Flops:
    """The FLOPs of one run of an instruction, of what is fused into it as well."""
    if instruction.opcode == "dot":
        return _dot(computation, instruction)
    if instruction.opcode == "convolution":
        return Flops(matmul=_convolution(computation, instruction))
    if instruction.opcode == "custom-call":
        return _custom_call(computation, instruction)
    total = Flops()
    if instruction.opcode in ("fusion", "fusion-start"):
        for name in instruction.called("calls"):
            inner = module.computations[name]
            for fused in inner:
                if fused.opcode in ("dot", "convolution", "fusion", "custom-call"):
                    total += flops(module, inner, fused)
    return total


def count_flops(module: Module) -> Flops:
    """The FLOPs of the whole program."""
    total = Flops()
    for execution in executions(module)[0]:
        found = flops(module, execution.computation, execution.instruction)
        if found != Flops():
            total += found * execution.times
    return total


def _sizes(text: str | None, shape: tuple[int, ...]) -> int:
    """The product of the axes "0,2" of a shape."""
    return math.prod(shape[int(axis)] for axis in (text or "").split(",") if axis)


def _dot(computation: Computation, dot: Instruction) -> Flops:
    left, right = (computation.operand(dot, side) for side in (0, 1))
    if left is None or right is None:
        return Flops()
    shape, other = left.arrays[0].shape, right.arrays[0].shape
    contracted = _sizes(dot.attribute(r"lhs_contracting_dims=\{([0-9,]*)\}"), shape)
    batch = _sizes(dot.attribute(r"lhs_batch_dims=\{([0-9,]*)\}"), shape)
    count = 2.0 * math.prod(dot.arrays[0].shape) * contracted
    own = [math.prod(sizes) // max(contracted * batch, 1) for sizes in (shape, other)]
    return Flops(matmul=count) if min(own) > 1 else Flops(vector=count)


def _convolution(computation: Computation, convolution: Instruction) -> float:
    """Multiply-adds of real entries alone: a TPU's batched products are convolutions whose windows
    mostly see padding, or the gaps between dilated entries."""
    labels = convolution.attribute(r"dim_labels=([\w?]+_[\w?]+->[\w?]+)")
    left, kernel = (computation.operand(convolution, side) for side in (0, 1))
    if labels is None or left is None or kernel is None:
        return 0.0
    read, weights, made = re.split(r"_|->", labels)
    entries, taps = left.arrays[0].shape, kernel.arrays[0].shape
    results = convolution.arrays[0].shape
    window = _window(convolution)
    count = 2.0 * results[made.index("b")] * results[made.index("f")] * taps[weights.index("i")]
    for axis in range(len(labels.split("_")[0]) - 2):
        count *= _valid_taps(
            entries[read.index(str(axis))],
            taps[weights.index(str(axis))],
            results[made.index(str(axis))],
            *window.get(axis, (1, 0, 1, 1)),
        )
    return count


def _window(convolution: Instruction) -> dict[int, tuple[int, int, int, int]]:
    """Spatial axis -> (stride, padding in front, dilation of the input, of the kernel)."""
    text = convolution.attribute(r"window=\{([^}]*)\}") or ""
    parts = dict(re.findall(r"(\w+)=([0-9x_\-]+)", text))
    if "size" not in parts:
        return {}
    rank = len(parts["size"].split("x"))

    def values(name: str, default: str) -> list[int]:
        return [int(part.split("_")[0]) for part in parts.get(name, default).split("x")]

    ones = "x".join("1" * rank)
    columns = (
        values("stride", ones),
        values("pad", "x".join("0" * rank)),
        values("lhs_dilate", ones),
        values("rhs_dilate", ones),
    )
    return {axis: tuple(column[axis] for column in columns) for axis in range(rank)}


@functools.lru_cache(maxsize=4096)
def _valid_taps(
    entries: int,
    taps: int,
    results: int,
    stride: int,
    pad: int,
    dilation: int,
    kernel_dilation: int,
) -> int:
    """Pairs of (result, tap) of one axis whose tap falls on an entry."""
    starts = np.arange(results) * stride - pad
    total = 0
    for tap in range(taps):
        places = starts + tap * kernel_dilation
        real = (places >= 0) & (places <= (entries - 1) * dilation) & (places % dilation == 0)
        total += int(np.count_nonzero(real))
    return total


_SILENT = (
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "GatherScatterIndicesBitpacked",
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "TopK",
    "annotate_device_placement",
)


def _custom_call(computation: Computation, call: Instruction) -> Flops:
    target = call.attribute(r'custom_call_target="([^"]*)"') or ""
    if flops := call.attribute(stated("flops")):
        return Flops(kernels=float(flops))
    if "gemm" in target or "matmul" in target:
        return _gemm(computation, call)
    if "fmha" in target or re.search("splash|flash", call.name + call.op_name):
        return _attention(computation, call)
    if target in _SILENT or not re.search("kernel|tpu_custom|mosaic|triton|cudnn", target):
        return Flops()
    return Flops(silent_kernels=(target,))


def _gemm(computation: Computation, call: Instruction) -> Flops:
    """A cuBLAS product: its contraction is in the backend's config."""
    found = call.attribute(r'"lhs_contracting_dimensions":(\[[^\]]*\])')
    left = computation.operand(call, 0)
    if not found or left is None:
        return Flops(silent_kernels=("gemm",))
    contracted = math.prod(left.arrays[0].shape[int(axis)] for axis in json.loads(found))
    return Flops(matmul=2.0 * math.prod(call.arrays[0].shape) * contracted)


# Products of an attention kernel over the square of positions, by what its name holds.
_PRODUCTS = (
    ("fmha.*backward", 5),
    ("dkv_dq|dq_dkv", 5),
    ("dkv", 4),
    ("dq", 3),
    ("bwd", 5),
    ("", 2),
)


def _attention(computation: Computation, call: Instruction) -> Flops:
    """An attention kernel's products, of which a causal one does half."""
    target = call.attribute(r'custom_call_target="([^"]*)"') or ""
    name = f"{target} {call.name}".lower()
    products = next(count for pattern, count in _PRODUCTS if re.search(pattern, name))
    made = (computation.get(operand) for operand in call.operands)
    inputs = [one.arrays[0] for one in made if one is not None and one.arrays]
    query = next(
        (a for a in inputs if a.dtype in ("bf16", "f16", "f32") and len(a.shape) > 2), None
    )
    if query is None:
        return Flops(silent_kernels=(target,))
    # [..., H, T, E] in kernels for TPUs, [B, T, H, E] or [B, H, T, E] in cuDNN's.
    length = query.shape[-2] if "fmha" not in target else max(query.shape[-3:-1])
    return Flops(attention=products * math.prod(query.shape) * length)
