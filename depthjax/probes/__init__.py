"""What do the layers do? The diagnostics of DepthBench and of arXiv 2603.15031, for any model.

One function each: model and token windows in, NumPy out.

    from depthjax.probes import angular_distance, causal_score
    angular_distance(model, input_ids)      # [L + 1, L + 1]

input_ids: int [W, T], windows of text; micro_batch: how many a device takes at a time, which bounds
the memory and changes no number. L layers have 2 L sublayers; a depth state is what stands at the
boundary of two layers. Undefined entries are NaN. Under a mesh (`jax.set_mesh`, or the mesh that
the parameters are laid over) windows are divided over its axes "data" and "fsdp".

All raise InputError for windows that do not fit the model, and NotApplicable, with the reason,
where the diagnostic says nothing about its residual connection. They reach a model through the
moves of the residual protocol alone (`residuals.base`). `probes.measure` runs all of them for one
checkpoint.
"""

from typing import Any

import numpy as np

from depthjax.errors import InputError
from depthjax.models import Transformer
from depthjax.probes.diagnostics import NotApplicable, diagnose
from depthjax.probes.fold import MICRO_BATCH


def angular_distance(
    model: Transformer, input_ids: Any, *, micro_batch: int = MICRO_BATCH
) -> np.ndarray:
    """[L + 1, L + 1]: mean angle, in parts of pi, between the states at two boundaries; NaN on and
    below the diagonal."""
    return diagnose("angular_distance", model, input_ids, micro_batch)["distance"]


def causal_score(
    model: Transformer, input_ids: Any, *, micro_batch: int = MICRO_BATCH
) -> np.ndarray:
    """[L, L]: how much of what layer l (column) adds changes when layer s (row) is left out; NaN on
    and below the diagonal."""
    return diagnose("causal_score", model, input_ids, micro_batch)["score"]


def permutation_score(
    model: Transformer, input_ids: Any, *, swap: str = "full", micro_batch: int = MICRO_BATCH
) -> np.ndarray:
    """[L, L]: relative change of the loss when two layers are exchanged; NaN on and below the
    diagonal. swap: "full", or "routing" for the connectors of streams alone."""
    names = {"full": "permutation_score", "routing": "permutation_score_routing"}
    if swap not in names:
        raise InputError(f"swap is {swap!r}: choose 'full' or 'routing'")
    return diagnose(names[swap], model, input_ids, micro_batch)["score"]


def layer_pruning_loss(
    model: Transformer, input_ids: Any, *, micro_batch: int = MICRO_BATCH
) -> np.ndarray:
    """[L]: the loss in nats a token with one layer left out."""
    return diagnose("layer_pruning_loss", model, input_ids, micro_batch)["loss"]


def logit_lens(model: Transformer, input_ids: Any, *, micro_batch: int = MICRO_BATCH) -> np.ndarray:
    """[L + 1, 3]: of what the head makes of the state at each boundary, the cross-entropy, the KL
    divergence from the model's own prediction, and the share of its five likeliest tokens."""
    found = diagnose("logit_lens", model, input_ids, micro_batch)
    return np.stack([found[name] for name in ("cross_entropy", "kl", "top5_overlap")], axis=1)


def usefulness(
    model: Transformer, input_ids: Any, *, micro_batch: int = MICRO_BATCH
) -> dict[str, np.ndarray]:
    """{"linear_loss" [L]: the loss with one layer replaced by an affine map fitted to it,
    "baseline_loss" [], "ratio" [L], "score" []: the share of layers with a ratio over 1.1}."""
    return diagnose("usefulness", model, input_ids, micro_batch)


def jacobian_norms(
    model: Transformer, input_ids: Any, *, micro_batch: int = MICRO_BATCH
) -> np.ndarray:
    """[L]: |J - I|_F / sqrt(D) of the mean Jacobian of each layer, target positions summed."""
    return diagnose("jacobian_norms", model, input_ids, micro_batch)["norms"]


def token_collapse(
    model: Transformer, input_ids: Any, *, micro_batch: int = MICRO_BATCH
) -> np.ndarray:
    """[L + 1, 3]: stable rank, effective rank, and l1 over l2 norm of the singular values of the
    tokens of a window, a mean over windows."""
    found = diagnose("token_collapse", model, input_ids, micro_batch)
    return np.stack([found[n] for n in ("stable_rank", "effective_rank", "l1_over_l2")], axis=1)


def transport_effective_rank(
    model: Transformer, input_ids: Any, *, micro_batch: int = MICRO_BATCH
) -> dict[str, np.ndarray]:
    """{"effective_rank" [W, T], "singular_values" [W, T, m], "stream_cosine" [W, T]} of the product
    of all transports between m streams."""
    return diagnose("transport_effective_rank", model, input_ids, micro_batch)


def path_weights(
    model: Transformer, input_ids: Any, *, micro_batch: int = MICRO_BATCH
) -> np.ndarray:
    """[2 L + 1, 2 L]: how much of a source (row 0 the embedding, row i + 1 the output of sublayer
    i) the input of a sublayer (column) contains; NaN where it comes too late."""
    return diagnose("path_weights", model, input_ids, micro_batch)["weights"]


def newest_source_weight(
    model: Transformer, input_ids: Any, *, micro_batch: int = MICRO_BATCH
) -> np.ndarray:
    """[2 L]: mean weight of readers 1 ... 2 L on their last source, the running sum."""
    return diagnose("newest_source_weight", model, input_ids, micro_batch)["weight"]


def mixing_matrix(
    model: Transformer, input_ids: Any, *, micro_batch: int = MICRO_BATCH
) -> dict[str, np.ndarray]:
    """The depth mixing matrix of R = 2 L + 1 readers and sources, {"matrix" [R, R], ...}, its
    ranks, and the entropy, look-back distance and weight on the embedding of each reader: see
    `probes.mixing.mixing_matrix`. Rows 0, 2, ... read before attention, 1, 3, ... before MLPs."""
    return diagnose("mixing_matrix", model, input_ids, micro_batch)


def magnitudes(
    model: Transformer, input_ids: Any, *, micro_batch: int = MICRO_BATCH
) -> dict[str, np.ndarray]:
    """{"output_rms" [L + 1] of the running state, "gradient_rms" [2 L] of the loss of a window by
    the outputs of the sublayers, "loss" []}."""
    return diagnose("magnitudes", model, input_ids, micro_batch)


__all__ = [
    "NotApplicable",
    "angular_distance",
    "causal_score",
    "jacobian_norms",
    "layer_pruning_loss",
    "logit_lens",
    "magnitudes",
    "mixing_matrix",
    "newest_source_weight",
    "path_weights",
    "permutation_score",
    "token_collapse",
    "transport_effective_rank",
    "usefulness",
]
