"""What to change in a config so that it fits, and about how much that saves."""

import dataclasses

from depthjax.config import Config
from depthjax.plan.memory import TrainingBytes

# Fields of the config that a knob stands for, in one place: they are looked up by these names.
REMAT, ACCUMULATE, BATCH, CONTEXT, PARAMETERS = (
    "model.remat",
    "train.accumulate",
    "train.batch",
    "model.context",
    "model.param_dtype",
)
REMAT_OFF, REMAT_ON = ("False", "none"), "true"
"""Values under which everything is kept, and the one to try instead."""


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
    prefill: int | None = None,
    count: int = 2,
) -> list[Knob]:
    """The `count` changes that would save most of a program with so many bytes of temporaries."""
    if prefill is not None:
        knobs = [Knob(f"--prefill {prefill // 2}", temp_bytes // 2)]
        knobs += _narrower(config, held.parameters)
        return sorted(knobs, key=lambda knob: -knob.saves)[:count]
    rows = config.train.batch // config.train.accumulate // devices
    tokens = rows * config.model.context
    gradient = 0 if config.train.accumulate > 1 else 2 * held.gradient
    activations = max(temp_bytes - held.gradient, 0)
    knobs = []
    if rows > 1:
        pieces = config.train.accumulate * 2
        while config.train.batch % (pieces * devices) and pieces < config.train.batch:
            pieces += config.train.accumulate
        share = config.train.accumulate / pieces
        if config.train.batch % (pieces * devices) == 0:
            saved = int(activations * (1 - share)) - gradient
            knobs.append(Knob(f"--{ACCUMULATE} {pieces}", saved))
        if config.train.accumulate == 1:
            knobs.append(Knob(f"--{BATCH} {config.train.batch // 2}", activations // 2))
    if str(config.model.remat) in REMAT_OFF:
        kept = tokens * held.layer_inputs_per_token
        logits = 3 * tokens * held.logits_per_token // 2  # fp32, its gradient and bf16 twins
        knobs.append(Knob(f"--{REMAT} {REMAT_ON}", max(activations - kept - logits, 0)))
    knobs.append(Knob(f"--{CONTEXT} {config.model.context // 2}", activations // 2))
    knobs += _narrower(config, held.parameters + held.optimizer)
    best = sorted(knobs, key=lambda knob: -knob.saves)[:count]
    return [knob for knob in best if knob.saves > 0]


def _narrower(config: Config, held: int) -> list[Knob]:
    if config.model.param_dtype != "float32":
        return []
    return [Knob(f"--{PARAMETERS} bfloat16", held // 2)]
