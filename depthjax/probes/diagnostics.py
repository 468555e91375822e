"""All diagnostics by name."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from depthjax.errors import InputError, suggest
from depthjax.models import Transformer
from depthjax.probes import geometry, layers, losses, magnitudes, mixing
from depthjax.probes.fold import MICRO_BATCH, Batches, Fold, Sums

DIAGNOSTICS: dict[str, Callable[[Batches], Fold]] = {
    "angular_distance": geometry.angular_distance,
    "causal_score": geometry.causal_score,
    "permutation_score": losses.permutation_score,
    "permutation_score_routing": functools.partial(losses.permutation_score, swap="routing"),
    "layer_pruning_loss": losses.layer_pruning_loss,
    "logit_lens": losses.logit_lens,
    "usefulness": layers.usefulness,
    "jacobian_norms": layers.jacobian_norms,
    "token_collapse": geometry.token_collapse,
    "transport_effective_rank": mixing.transport_effective_rank,
    "path_weights": mixing.path_weights,
    "newest_source_weight": mixing.newest_source_weight,
    "mixing_matrix": mixing.mixing_matrix,
    "magnitudes": magnitudes.magnitudes,
}


class NotApplicable(InputError):
    """A diagnostic says nothing about a residual connection; the message tells why."""


def check_applies(name: str, model: Transformer) -> None:
    """Raises NotApplicable with the reason where diagnostic `name` does not suit the model."""
    rule = model.residual.rule
    if name in rule.limits:
        raise NotApplicable(f"{name} does not apply to {rule.name}: {rule.limits[name]}")


def check_names(names: Iterable[str]) -> None:
    """Raises InputError for a name of no diagnostic."""
    for name in names:
        if name not in DIAGNOSTICS:
            raise InputError(f"{name!r} is no diagnostic: {suggest(name, DIAGNOSTICS)}")


def diagnose(name: str, model: Transformer, input_ids: Any, micro_batch: int = MICRO_BATCH) -> Sums:
    """All arrays of diagnostic `name`; raises NotApplicable, or InputError for bad input."""
    check_names([name])
    check_applies(name, model)
    return DIAGNOSTICS[name](Batches(model, input_ids, micro_batch)).run()
