"""One line of a plan: a program compiled for a target, and every figure of it, by device."""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import jax

from depthjax.aot.compile import Compiled, Inference, compile_lowered, lower
from depthjax.aot.knobs import Knob, helpful_knobs, inference_knobs
from depthjax.aot.topology import Target
from depthjax.config import Config
from depthjax.parallel import batch_ways
from depthjax.plan.flops import (
    decode_flops,
    matmul_flops_per_sequence,
    prefill_flops,
    training_flops_per_token,
)
from depthjax.plan.hlo import Module, parse
from depthjax.plan.hlo_buffers import Buffer, largest_buffers
from depthjax.plan.hlo_collectives import Collective, collectives
from depthjax.plan.hlo_cost import Flops, count_flops, executions
from depthjax.plan.hlo_history import history_bytes
from depthjax.plan.hlo_traffic import hbm_bytes
from depthjax.plan.info import parameter_counts
from depthjax.plan.memory import cache_bytes, decoding_parameter_bytes, training_bytes

COUNTED = "counted"  # from the executable
MODEL = "compiler"  # the compiler's own estimate
FORMULA = "formula"

GRADES = {
    "parameter_bytes": FORMULA,
    "optimizer_bytes": FORMULA,
    "cache_bytes": FORMULA,
    "history_bytes": COUNTED,
    "argument_bytes": COUNTED,
    "temp_bytes": COUNTED,
    "peak_bytes": COUNTED,
    "hbm_bytes": COUNTED,
    "hbm_bytes_per_token": COUNTED,
    "flops_compiled": COUNTED,
    "flops_formula": FORMULA,
    "collective_bytes": COUNTED,
    "hlo_instructions": COUNTED,
    "compile_cpu_s": "measured",
    "seconds": FORMULA,
    "mfu_ceiling": FORMULA,
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """Figures of one device, bytes and FLOPs of one run of the program; None where the program
    could not be compiled to the end. Their grades are in `GRADES`."""

    variant: str
    shape: str
    topology: str
    devices: int
    program: str
    """"training step", "prefill of T tokens", or "decode step after T tokens"."""
    sequences: int
    """Sequences of one step, on all devices together."""
    tokens: int
    """Of one sequence; of a decode step 1."""
    parameters: int
    parameter_bytes: int
    optimizer_bytes: int
    cache_bytes: int
    """Keys and values that a decode step finds or a chunked prefill makes; else 0."""
    history_bytes: int
    """What the sources that the residual connection remembers take of a prefill; else 0."""
    argument_bytes: int | None
    temp_bytes: int | None
    peak_bytes: int | None
    capacity_bytes: int
    fits: bool
    hbm_bytes: float | None
    flops_compiled: float | None
    flops_formula: float
    collective_bytes: float | None
    collectives: list[Collective]
    hlo_instructions: int | None
    compile_cpu_s: float
    seconds: dict[str, float]
    """By resource (compute, memory, links): the least time that it needs at its peak rate."""
    mfu_ceiling: float | None
    """Model FLOPs over what the device could do in the longest of these times."""
    largest_buffers: list[Buffer]
    knobs: list[Knob]
    grades: dict[str, str]
    notes: list[str]

    @property
    def binding(self) -> str | None:
        """The resource that takes longest."""
        return max(self.seconds, key=lambda name: self.seconds[name]) if self.seconds else None

    @property
    def roofline(self) -> float | None:
        """Seconds of one step where all resources work at their peak and at the same time."""
        return self.seconds[self.binding] if self.binding else None

    @property
    def hbm_bytes_per_token(self) -> float | None:
        """Of the tokens that one device computes."""
        if self.hbm_bytes is None:
            return None
        return self.hbm_bytes * self.devices / (self.sequences * self.tokens)

    @property
    def missing_bytes(self) -> int:
        """By how much it does not fit; 0 where it does."""
        return 0 if self.fits else max((self.peak_bytes or 0) - self.capacity_bytes, 0)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        derived = {"binding": self.binding, "roofline_s": self.roofline}
        derived["hbm_bytes_per_token"] = self.hbm_bytes_per_token
        return {**dataclasses.asdict(self), **derived, "missing_bytes": self.missing_bytes}


def make_entry(
    config: Config,
    vocab: int,
    target: Target,
    mesh: jax.sharding.Mesh,
    *,
    options: dict[str, Any],
    inference: Inference | None = None,
) -> Entry:
    """Compiles a config's training step, or a program of inference in place of it, and counts."""
    compiled = compile_lowered(lower(config, vocab, mesh, inference), target, options)
    program = compiled.executable and parse(compiled.executable.as_text())
    work = _Work.of(config, vocab, mesh, inference)
    figures = _memory(compiled, target) | _counts(program, dict(mesh.shape), target.slices)
    counts = parameter_counts(config, vocab)
    parameters = sum(counts.values())
    held = training_bytes(config, vocab, parameters)
    kept, cache, history = held.parameters, 0, 0
    if inference is not None and inference.kind == "decode":
        kept = decoding_parameter_bytes(config, counts)
    if inference is not None and (inference.kind == "decode" or inference.chunk):
        cache = inference.rows * cache_bytes(config, inference.tokens)
    if inference is not None and inference.kind == "prefill" and program:
        history = history_bytes(program, config.residual, config.shape, config.model.dtype)
    flops = figures.pop("flops")
    traffic = figures["hbm_bytes"], figures["collective_bytes"]
    seconds = _seconds(target, program, flops, *traffic)
    notes = _notes(target, program, flops, work, config, inference)
    grades = dict(GRADES)
    if flops and flops.kernels:
        grades["flops_compiled"] = f"{COUNTED}, kernels by their own estimate"
    if flops and flops.attention:
        grades["flops_compiled"] = f"{COUNTED}, attention kernels by formula"
    if program is None:
        grades |= {"temp_bytes": MODEL, "peak_bytes": MODEL}
    return Entry(
        variant=config.residual.name,
        shape=config.model.shape,
        topology=target.name,
        devices=mesh.size,
        program="training step" if inference is None else str(inference),
        sequences=work.sequences,
        tokens=work.tokens,
        parameters=parameters,
        parameter_bytes=kept,
        optimizer_bytes=held.optimizer if inference is None else 0,
        cache_bytes=cache,
        history_bytes=history,
        flops_compiled=flops and flops.total,
        flops_formula=work.model_flops,
        compile_cpu_s=round(compiled.cpu_seconds, 1),
        seconds=seconds,
        mfu_ceiling=_ceiling(target, work, seconds),
        largest_buffers=largest_buffers(program) if program else [],
        knobs=_knobs(config, mesh.size, held, figures, inference),
        grades=grades,
        notes=notes,
        **figures,
    )


@dataclasses.dataclass(frozen=True)
class _Work:
    """What one step does by formula. sequences: on all devices; FLOPs: of one device."""

    sequences: int
    tokens: int
    model_flops: float
    executed_flops: float
    """Products of two matrices, with whole attention squares and without rematerialisation."""

    @classmethod
    def of(cls, config: Config, vocab: int, mesh: Any, inference: Inference | None) -> "_Work":
        cost = (config.shape, vocab)
        if inference is None:
            sequences, tokens = config.train.batch, config.model.context
            model = tokens * training_flops_per_token(*cost, tokens, config.residual)
            executed = matmul_flops_per_sequence(*cost, tokens, config.residual)
        elif inference.kind == "decode":
            sequences, tokens = batch_ways(mesh) * inference.rows, 1
            model = decode_flops(*cost, inference.tokens, config.residual)
            executed = model
        else:
            sequences, tokens = batch_ways(mesh) * inference.rows, inference.tokens
            model = prefill_flops(*cost, tokens, config.residual)
            executed = matmul_flops_per_sequence(*cost, tokens, config.residual) / 3
            executed -= (tokens - 2) * 2 * config.shape.width * vocab
        share = sequences / mesh.size
        return cls(sequences, tokens, share * model, share * executed)


def _memory(compiled: Compiled, target: Target) -> dict[str, Any]:
    """The fields of an entry that say what is held."""
    capacity = _capacity(target)
    if compiled.executable is None:
        return {
            "argument_bytes": None,
            "temp_bytes": compiled.needed,
            "peak_bytes": compiled.needed,
            "capacity_bytes": capacity,
            "fits": False,
        }
    stats = compiled.executable.memory_analysis()
    made = stats.output_size_in_bytes - stats.alias_size_in_bytes
    everything = stats.argument_size_in_bytes + made + stats.temp_size_in_bytes
    peak = getattr(stats, "peak_memory_in_bytes", 0)
    if not peak or target.platform == "cpu":  # XLA's CPU does not know its peak
        peak = everything
    peak += stats.generated_code_size_in_bytes
    return {
        "argument_bytes": stats.argument_size_in_bytes,
        "temp_bytes": stats.temp_size_in_bytes,
        "peak_bytes": peak,
        "capacity_bytes": capacity,
        "fits": peak <= capacity,
    }


def _knobs(config, devices: int, held, figures: Mapping[str, Any], inference: Inference | None):
    if figures["fits"]:
        return []
    missing = figures["peak_bytes"] - figures["capacity_bytes"]
    if inference is None:
        return helpful_knobs(config, devices, held, figures["temp_bytes"], missing)
    return inference_knobs(config, held, figures["temp_bytes"], inference)


def _capacity(target: Target) -> int:
    """Bytes that one device has for a program."""
    if target.chip is not None and target.chip.usable is not None:
        return target.chip.usable
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // target.devices


def _counts(program: Module | None, mesh: Mapping[str, int], slices: int) -> dict[str, Any]:
    """The fields of an entry that are counted on the program's text, and `flops`."""
    if program is None:
        names = ("hbm_bytes", "collective_bytes", "hlo_instructions", "flops")
        return {**dict.fromkeys(names), "collectives": []}
    found = collectives(program, mesh, slices)
    return {
        "flops": count_flops(program),
        "hbm_bytes": hbm_bytes(program),
        "collectives": found,
        "collective_bytes": math.fsum(collective.sent for collective in found),
        "hlo_instructions": program.instructions,
    }


def _seconds(
    target: Target,
    program: Module | None,
    flops: Flops | None,
    moved: float | None,
    sent: float | None,
) -> dict[str, float]:
    if target.chip is None or flops is None or executions(program)[1]:
        return {}  # also where a loop of unknown length has more than was counted
    chip = target.chip
    return {
        "compute": flops.total / chip.flops,
        "memory": moved / chip.hbm,
        "links": sent / chip.links,
    }


def _ceiling(target: Target, work: _Work, seconds: Mapping[str, float]) -> float | None:
    if target.chip is None or not seconds:
        return None
    return work.model_flops / (target.chip.flops * max(seconds.values()))


def _notes(
    target: Target,
    program: Module | None,
    flops: Flops | None,
    work: _Work,
    config: Config,
    inference: Inference | None,
) -> list[str]:
    """What a reader should know of these figures."""
    if program is None or flops is None:
        return ["the compiler gave up for lack of memory: only what it asked for is known"]
    notes = []
    if unknown := executions(program)[1]:
        notes.append(f"{len(unknown)} loops of unknown length count once: {', '.join(unknown[:3])}")
    names = [name for c in program.computations.values() for name in c.instructions]
    repeated = sum(".remat" in name for name in names)
    if target.platform == "tpu" and repeated:
        notes.append(
            f"memory is so tight that the compiler itself computes {repeated} values again, which "
            "costs FLOPs and bytes"
        )
    if flops.silent_kernels:
        kernels = ", ".join(flops.silent_kernels)
        notes.append(f"kernels that state no FLOPs count none: {kernels}")
    ratio = flops.total / work.executed_flops
    if inference is not None and inference.kind == "decode":
        if ratio < 0.9:
            notes.append(
                "products of few rows, such as one token's, are compiled as sums, whose FLOPs are "
                "not counted"
            )
    elif not 0.5 < ratio < 1.6:  # half: causal kernels; a third more: rematerialisation
        notes.append(
            f"counted FLOPs are {ratio:.2f} of the formula's: part of the program was misread, and "
            "its bytes may be wrong as well"
        )
    if target.platform == "gpu" and config.model.dtype == "bfloat16":
        notes.append(
            "attention is XLA's here; on the GPU itself cuDNN's is used, which keeps no T x T array"
        )
    return notes
