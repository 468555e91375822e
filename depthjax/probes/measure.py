"""All diagnostics of one checkpoint, in files that a stopped run goes on from.

L layers have S = 2 L sublayers, even ones attention, odd ones MLPs, and R = S + 1 readers: reader s
stands in front of sublayer s, the last one is the final read. Source 0 is the embedding, source i +
1 the output of sublayer i. m streams, W windows. All float64; NaN where undefined.

    angular_distance          distance [L+1, L+1], from boundary (row) to a later one (column)
    causal_score              score [L, L], of the skipped layer (row) on a later one (column);
                              ratio [] = R_causal
    permutation_score         score [L, L], above the diagonal; ratio [] = R_perm; baseline_loss []
    permutation_score_routing the same with only the connectors of streams exchanged
    layer_pruning_loss        loss [L], baseline_loss [], delta [L]
    logit_lens                cross_entropy, kl, top5_overlap, all [L+1]
    usefulness                linear_loss [L], baseline_loss [], ratio [L], score []
    jacobian_norms            norms [L]
    token_collapse            stable_rank, effective_rank, l1_over_l2, all [L+1]
    transport_effective_rank  effective_rank [], effective_rank_interval [2], stream_cosine [],
                              stream_cosine_interval [2], singular_values [m] (over the largest),
                              singular_values_interval [m, 2], by_window [W, m+2] (effective rank,
                              stream cosine, singular values); means over tokens, with 95 %
                              intervals of a bootstrap over windows
    path_weights              weights [S+1, S], of a source (row) in what a sublayer reads (column)
    newest_source_weight      weight [S] of readers 1 ... S, sources [S]
    mixing_matrix             matrix [R, R] (row reads column), entropy [R], look_back [R],
                              embedding_weight [R], singular_values [R], rank [],
                              semiseparable_rank []; rows [0:S:2] read before attention, [1:S:2]
                              before MLPs, [S] at the end
    magnitudes                output_rms [L+1], gradient_rms [S], loss []

`meta.json` says the rest: name, variant, residual, layers, width, vocab, parameters, streams (None:
one), block_boundaries (sublayers in front of which a block of sources is closed), thresholds,
late_from (ratios count pairs of layers from there on), tokens and windows by diagnostic, budget,
seed, micro_batch, not_applicable ({diagnostic: reason}), seconds, versions, done.
"""

import hashlib
import math
import pathlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from flax import nnx

import depthjax
from depthjax.errors import InputError
from depthjax.models import Transformer
from depthjax.probes.diagnostics import DIAGNOSTICS, NotApplicable, check_applies, check_names
from depthjax.probes.fold import MICRO_BATCH, Batches, Fold, Sums
from depthjax.probes.layers import SIGNIFICANT
from depthjax.probes.results import Results, read_arrays, read_meta, write_arrays, write_meta
from depthjax.probes.windows import Windows

THRESHOLDS = {"causal_score": 0.45, "permutation_score": 0.15, "usefulness": SIGNIFICANT}
"""Of R_causal, R_perm (DepthBench, section 7) and the share of useful layers."""

SAVE_SECONDS = 10.0
SAVING_SHARE = 20  # of the time, one part: sums of a large model are gigabytes
RESAMPLES = 2000  # of the bootstrap

Progress = Callable[[str, int, int], None]


def measure(
    model: Transformer,
    windows: Windows,
    out_dir: str | pathlib.Path,
    *,
    only: Iterable[str] | None = None,
    progress: Progress = lambda diagnostic, done, steps: None,
    name: str | None = None,
    micro_batch: int = MICRO_BATCH,
) -> Results:
    """Runs the diagnostics that `out_dir` lacks and returns all that it holds then.

    only: names of diagnostics; None: all. progress: told (diagnostic, steps done, steps). name: of
    the checkpoint; None: its variant. A diagnostic that does not apply to the model is named with
    its reason in `meta`, and the rest goes on. Each is written when it is finished; a long one
    leaves its sums every few seconds, and goes on from there.
    Raises InputError for a name of no diagnostic, or where `out_dir` holds results of another model
    or other windows.
    """
    names = list(DIAGNOSTICS) if only is None else list(only)
    check_names(names)
    out_dir = pathlib.Path(out_dir)
    meta = _opened(out_dir, _meta(model, windows, name, micro_batch))
    for diagnostic in names:
        try:
            check_applies(diagnostic, model)
        except NotApplicable:
            meta["not_applicable"][diagnostic] = model.residual.rule.limits[diagnostic]
            continue
        if diagnostic in meta["done"]:
            continue
        batches, began = Batches(model, windows.ids[diagnostic], micro_batch), time.monotonic()
        fold, partial = DIAGNOSTICS[diagnostic](batches), out_dir / f".{diagnostic}.partial.npz"
        sums = _resumable(
            fold,
            batches,
            partial,
            lambda done, steps: progress(diagnostic, done, steps),  # noqa: B023
        )
        arrays = _summarized(diagnostic, fold.result(sums), batches.shape.layers)
        write_arrays(out_dir / f"{diagnostic}.npz", arrays)
        meta["done"].append(diagnostic)
        meta["seconds"][diagnostic] = round(time.monotonic() - began, 2)
        meta["tokens"][diagnostic] = batches.tokens
        meta["windows"][diagnostic] = [batches.windows, batches.length]
        write_meta(out_dir, meta)
        partial.unlink(missing_ok=True)
    write_meta(out_dir, meta)
    return Results.load(out_dir)


def _resumable(
    fold: Fold, batches: Batches, partial: pathlib.Path, progress: Callable[[int, int], None]
) -> Sums:
    """The sums after all steps, which `partial` holds from time to time."""
    first, sums = _restored(fold, batches, partial)
    progress(first, fold.steps)
    saved, pause = time.monotonic(), SAVE_SECONDS
    for k in range(first, fold.steps):
        fold.step(k, sums)
        if (now := time.monotonic()) - saved > pause:
            write_arrays(partial, {**sums, _STEP: k + 1, _ROWS: batches.rows})
            saved = time.monotonic()
            pause = max(SAVE_SECONDS, SAVING_SHARE * (saved - now))
        progress(k + 1, fold.steps)
    return sums


_STEP, _ROWS = "next_step", "rows"


def _restored(fold: Fold, batches: Batches, partial: pathlib.Path) -> tuple[int, Sums]:
    """(next step, sums): from the start where nothing fits the fold, whose steps depend on how many
    rows a micro-batch has."""
    if partial.exists():
        arrays = read_arrays(partial)
        first, rows = int(arrays.pop(_STEP)), int(arrays.pop(_ROWS))
        if rows == batches.rows:
            return first, arrays
    return 0, {name: array.copy() for name, array in fold.sums.items()}


def late_ratio(score: np.ndarray, threshold: float) -> float:
    """The share of pairs of different layers from ceil(L / 4) on, of scores [L, L] above the
    diagonal, whose score is over the threshold (DepthBench, section 7); NaN without such pairs."""
    late = score[late_from(len(score)) :, late_from(len(score)) :]
    pairs = late[np.triu_indices(len(late), 1)]
    return float(np.mean(pairs > threshold)) if len(pairs) else math.nan


def late_from(layers: int) -> int:
    """The first layer that counts as late."""
    return -(-layers // 4)


def bootstrap_interval(values: np.ndarray, seed: int = 0) -> np.ndarray:
    """[..., 2]: the 95 % interval of the mean of values [W, ...] under resampling of W."""
    random = np.random.default_rng(seed)
    chosen = random.integers(len(values), size=(RESAMPLES, len(values)))
    means = np.stack([values[index].mean(axis=0) for index in chosen])
    return np.moveaxis(np.percentile(means, (2.5, 97.5), axis=0), 0, -1)


def _summarized(diagnostic: str, arrays: Sums, layers: int) -> Sums:
    """The arrays as they are saved."""
    if diagnostic.startswith(("causal_score", "permutation_score")):
        threshold = THRESHOLDS[diagnostic.removesuffix("_routing")]
        return {**arrays, "ratio": np.float64(late_ratio(arrays["score"], threshold))}
    if diagnostic == "transport_effective_rank":
        return _by_window(**arrays)
    return arrays


def _by_window(effective_rank, singular_values, stream_cosine) -> Sums:
    """Of values by token, [W, T, ...]: means and intervals over windows."""
    relative = singular_values / singular_values[..., :1]
    by_window = np.column_stack(
        [effective_rank.mean(1), stream_cosine.mean(1), relative.mean(1)],
    )
    mean, interval = by_window.mean(axis=0), bootstrap_interval(by_window)
    return {
        "effective_rank": mean[0],
        "effective_rank_interval": interval[0],
        "stream_cosine": mean[1],
        "stream_cosine_interval": interval[1],
        "singular_values": mean[2:],
        "singular_values_interval": interval[2:],
        "by_window": by_window,
    }


def _meta(
    model: Transformer, windows: Windows, name: str | None, micro_batch: int
) -> dict[str, Any]:
    """meta.json before the first diagnostic."""
    rule, layers = model.residual.rule, model.shape.layers
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    slots = len(rule.slots(layers)) if "transport_effective_rank" not in rule.limits else None
    return {
        "name": name or rule.name,
        "variant": rule.name,
        "residual": repr(rule),
        "layers": layers,
        "width": model.shape.width,
        "vocab": model.vocab,
        "parameters": sum(leaf.size for leaf in leaves),
        "streams": slots,
        "block_boundaries": list(rule.boundaries(layers)),
        "thresholds": THRESHOLDS,
        "late_from": late_from(layers),
        "budget": windows.budget,
        "seed": windows.seed,
        "micro_batch": micro_batch,
        "versions": {
            "depthjax": depthjax.__version__,
            "jax": jax.__version__,
            "backend": jax.default_backend(),
        },
        "fingerprint": {
            "model": _digest([repr(rule), repr(model.shape), *map(_sample, leaves)]),
            "windows": {key: _digest([ids.tobytes()]) for key, ids in windows.ids.items()},
        },
        "done": [],
        **{key: {} for key in ("tokens", "windows", "seconds", "not_applicable")},
    }


def _sample(leaf: jax.Array) -> bytes:
    """A few of its values: training moves all of them. On the host, as a mesh in force need not be
    where it lies."""
    return np.asarray(leaf).reshape(-1)[:256].tobytes()


def _digest(parts: Iterable[str | bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()[:16]


def _opened(out_dir: pathlib.Path, fresh: dict[str, Any]) -> dict[str, Any]:
    """The meta of `out_dir` to go on with; `fresh` where it is new. InputError where it holds
    something else."""
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"out {str(out_dir)!r} cannot be written to ({error.strerror})") from error
    meta = read_meta(out_dir)
    if meta is None:
        write_meta(out_dir, fresh)
        return fresh
    for part in ("model", "windows"):
        if meta["fingerprint"][part] != fresh["fingerprint"][part]:
            raise InputError(
                f"out {str(out_dir)!r} holds diagnostics of {meta['name']} with other {part}: give "
                "another directory or remove it"
            )
    kept = ("done", "tokens", "windows", "seconds", "not_applicable")
    return {**fresh, **{key: meta[key] for key in kept}}
