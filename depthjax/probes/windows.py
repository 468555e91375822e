"""Windows of held-out text for the diagnostics, drawn as the DepthBench authors draw theirs."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from depthjax.data.shards import TokenSplit
from depthjax.errors import InputError, suggest

SEED = 42

PAPER = {  # windows, tokens each (DepthBench, section 7)
    "angular_distance": (128, 512),
    "causal_score": (16, 256),
    "permutation_score": (12, 256),
    "permutation_score_routing": (12, 256),
    "layer_pruning_loss": (16, 256),
    "logit_lens": (32, 512),
    "usefulness": (1024, 512),
    "jacobian_norms": (128, 512),
    # For these the paper gives no size.
    "token_collapse": (128, 512),
    "transport_effective_rank": (128, 512),
    "path_weights": (32, 512),
    "newest_source_weight": (32, 512),
    "mixing_matrix": (32, 512),
    "magnitudes": (32, 512),
}
SMALL = {
    **dict.fromkeys(PAPER, (8, 128)),
    "usefulness": (32, 128),
    "jacobian_norms": (2, 128),
    "transport_effective_rank": (16, 128),
}
BUDGETS = {"small": SMALL, "full": PAPER}
"""(windows, tokens each) by diagnostic; "small" is what a laptop's CPU does in minutes."""


@dataclasses.dataclass(frozen=True)
class Windows:
    """What the diagnostics run on."""

    ids: Mapping[str, np.ndarray]
    """int32 [windows, tokens] by diagnostic."""
    budget: str
    seed: int


def draw_windows(
    files: Sequence[np.ndarray], count: int, length: int, seed: int = SEED
) -> np.ndarray:
    """int32 [count, length] out of files of token ids: a file is chosen in proportion to its tokens
    less `length`, then one of so many starts, uniformly (DepthBench, section 7).

    Raises InputError where no file is longer than a window.
    """
    room = np.array([len(file) - length for file in files])
    if not len(room) or room.max() < 1:
        longest = max((len(file) for file in files), default=0)
        raise InputError(
            f"windows of {length} tokens do not fit the held-out text, whose longest file has "
            f"{longest}: give longer text or shorter windows"
        )
    room = np.maximum(room, 0)
    random = np.random.default_rng(seed)
    windows = np.empty((count, length), np.int32)
    for window in windows:
        file = random.choice(len(files), p=room / room.sum())
        start = random.integers(room[file])
        window[:] = files[file][start : start + length]
    return windows


def check_budget(budget: str) -> None:
    """Raises InputError unless it is "small" or "full"."""
    if budget not in BUDGETS:
        raise InputError(f"budget is {budget!r}: {suggest(budget, BUDGETS)}")


def probe_windows(
    split: TokenSplit, budget: str = "small", longest: int | None = None, seed: int = SEED
) -> Windows:
    """Windows for each diagnostic, all drawn from `split` with the same seed.

    budget: "small" or "full" (the paper's sizes). longest: the most tokens of a window, for a model
    that was trained on shorter context. Raises InputError for another budget, or too little text.
    """
    check_budget(budget)
    if not split.tokens:
        raise InputError(f"data.dir has no tokens in its {split.name} split to probe with")
    files = [shard.memmap() for shard in split.shards]
    ids = {
        name: draw_windows(files, count, min(length, longest or length), seed)
        for name, (count, length) in BUDGETS[budget].items()
    }
    return Windows(ids, budget, seed)
