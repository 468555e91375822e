"""What to change in a config so that it fits, and about how much that saves."""

import dataclasses

from depthjax.aot.compile import Inference
from depthjax.config import Config
from depthjax.plan.memory import TrainingBytes, cache_bytes

# Fields of the config that a knob stands for, in one place: they are looked up by these names.
REMAT, ACCUMULATE = "model.remat", "train.accumulate"
CONTEXT, PARAMETERS = "model.context", "model.param_dtype"
REMAT_OFF, REMAT_ON = ("none", "dots"), "layer"
"""Policies under which much of every layer is kept, and the one to try instead."""


@dataclasses.dataclass(frozen=True)
class Knob:
    """A change, as it is typed, and the bytes a device that it saves, about, by formula."""

    change: str
    saves: int


def helpful_knobs(
    config: Config,
    devices: int,
    held: TrainingBytes,
    temp_bytes: int,
    missing: int,
    count: int = 2,
) -> list[Knob]:
    """The `count` changes that would save most of a program with so many bytes of temporaries, of
    which `missing` do not fit. What would train another model comes in only where nothing else is
    left."""
    train, activations = config.train, max(temp_bytes - held.gradient, 0)
    rows = train.batch // train.accumulate // devices
    # Accumulation adds up gradients in fp32, in an array of its own.
    sums = held.gradient if train.accumulate == 1 else 0
    knobs = []
    for pieces in _divisors(rows):
        saved = activations - activations // pieces
        knobs.append(Knob(f"--{ACCUMULATE} {train.accumulate * pieces}", saved - sums))
        if saved - sums >= missing:
            break
    knobs = knobs[-1:]
    for times in _divisors(rows):
        saved = activations - activations // times
        more = Knob(f"{times} times as many devices ({devices * times})", saved)
        if saved >= missing:
            break
    if rows > 1:
        knobs.append(more)
    if config.model.remat in REMAT_OFF:
        tokens = rows * config.model.context
        kept = tokens * (held.layer_inputs_per_token + 2 * held.logits_per_token)
        knobs.append(Knob(f"--{REMAT} {REMAT_ON}", activations - kept))
    knobs += _narrower(config, held.parameters + held.optimizer)
    if rows == 1:
        knobs.append(Knob(f"--{CONTEXT} {config.model.context // 2}", activations // 2))
    return _best(knobs, count)


def inference_knobs(
    config: Config, held: TrainingBytes, temp_bytes: int, inference: Inference
) -> list[Knob]:
    """The same for a prefill or a decode step."""
    tokens, rows = inference.tokens, inference.rows
    if inference.kind == "prefill":
        shorter = [Knob(f"--prefill {tokens // 2}", temp_bytes // 2)] if tokens > 3 else []
        return _best([*shorter, *_narrower(config, held.parameters)], 2)
    half = rows * cache_bytes(config, tokens) // 2
    knobs = [Knob(f"--decode {rows}x{tokens // 2}", half)] if tokens > 1 else []
    if rows > 1:
        knobs.append(Knob(f"--decode {rows // 2}x{tokens}", half))
    return knobs


def _divisors(rows: int) -> list[int]:
    return [n for n in range(2, rows + 1) if rows % n == 0]


def _best(knobs: list[Knob], count: int) -> list[Knob]:
    saving = [knob for knob in knobs if knob.saves > 0]
    return sorted(saving, key=lambda knob: -knob.saves)[:count]


def _narrower(config: Config, held: int) -> list[Knob]:
    if config.model.param_dtype != "float32":
        return []
    return [Knob(f"--{PARAMETERS} bfloat16", held // 2)]
