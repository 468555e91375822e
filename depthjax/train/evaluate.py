"""Held-out losses: the true mean, the DepthBench authors' definition, and a unigram yardstick."""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from depthjax.config import Config
from depthjax.data import heldout_documents, heldout_windows
from depthjax.data.shards import TokenShards, TokenSplit
from depthjax.errors import InputError
from depthjax.train.checkpoint import Checkpoints
from depthjax.train.inputs import open_data
from depthjax.train.run_dir import check_unchanged
from depthjax.train.step import Program, data_mesh
from depthjax.train.stop import StopSignal


@dataclasses.dataclass(frozen=True)
class HeldoutLosses:
    """Nats a token."""

    heldout_loss: float
    """Mean over every prediction in non-overlapping windows of the held-out stream."""
    heldout_loss_authors: float
    """One instance a document, cut at the context; the losses are divided by all its tokens,
    although the last has no prediction (DepthBench, "validation loss"): a little lower than a true
    mean."""
    heldout_unigram_loss: float
    """The predictions of `heldout_loss`, under the (add-one) token frequencies of the training
    text: what a model that ignores context would get."""


def heldout_losses(
    program: Program,
    params: Any,
    shards: TokenShards,
    vocab: int,
    batches: int | None = None,
    stop: StopSignal | None = None,
) -> HeldoutLosses:
    """All three on at most `batches` batches of each kind (None: all held-out data).

    Raises Stopped as soon as `stop` is requested.
    """
    config, split = program.config, shards.heldout
    windows = _predictions(program, params, _windows(config, split), batches, stop)
    documents = _predictions(program, params, _documents(config, split), batches, stop)
    return HeldoutLosses(
        heldout_loss=windows[0] / windows[1],
        heldout_loss_authors=documents[0] / (documents[1] + documents[2]),
        heldout_unigram_loss=unigram_loss(config, shards, vocab, batches),
    )


def heldout_loss(
    program: Program,
    params: Any,
    shards: TokenShards,
    batches: int | None = None,
    stop: StopSignal | None = None,
) -> float:
    """The true mean alone, as logged during training; raises Stopped once `stop` is requested."""
    windows = _windows(program.config, shards.heldout)
    total, predictions, _ = _predictions(program, params, windows, batches, stop)
    return total / predictions


def unigram_loss(
    config: Config, shards: TokenShards, vocab: int, batches: int | None = None
) -> float:
    """Cross entropy of the held-out predictions under add-one smoothed training frequencies."""
    counts = shards.train.unigram_counts(vocab) + 1
    nats = np.log(counts.sum()) - np.log(counts)
    total = predictions = 0
    for rows, lengths in itertools.islice(_windows(config, shards.heldout), batches):
        targets = rows[lengths > 0, 1:]
        total, predictions = total + nats[targets].sum(), predictions + targets.size
    return float(total / predictions)


def evaluate_run(config: Config, say: Callable[[str], None]) -> dict[str, Any]:
    """The step and held-out losses of the newest checkpoint in `config.run.dir`.

    Raises InputError where there is none or the data do not fit.
    """
    folder = pathlib.Path(config.run.dir) / "checkpoints"
    config.check_devices(jax.device_count())
    shards, vocab = open_data(config)
    program = Program(config, vocab, data_mesh())
    checkpoints = Checkpoints(folder, keep=None, say=say) if folder.is_dir() else None
    restored = checkpoints and checkpoints.restore(
        program.abstract_state(), lambda meta: check_unchanged(meta["config"], config) is not None
    )
    if not restored:
        raise InputError(f"run.dir {config.run.dir} holds no checkpoint: train it first")
    state, _ = restored
    losses = heldout_losses(program, state.params, shards, vocab, config.run.eval_batches)
    return {"step": int(state.step), **dataclasses.asdict(losses)}


def _batch(config: Config) -> int:
    return config.train.batch // config.train.accumulate


def _windows(config: Config, split: TokenSplit) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    context = config.model.context
    for rows, real in heldout_windows(split, context, _batch(config)):
        yield rows, np.where(real, context, 0)


def _documents(config: Config, split: TokenSplit) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    return heldout_documents(split, config.model.context, _batch(config))


def _predictions(
    program: Program,
    params: Any,
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    most: int | None,
    stop: StopSignal | None,
) -> tuple[float, int, int]:
    """(summed loss, predictions, rows) of batches of (input_ids [B, T], lengths [B])."""
    total, predictions, rows = [], 0, 0
    for input_ids, lengths in itertools.islice(batches, most):
        if stop is not None:
            jax.block_until_ready(total)
            stop.check()
        mine = _mine(len(lengths))
        ids, sizes = program.put(input_ids[mine]), program.put(lengths[mine].astype(np.int32))
        total.append(program.heldout(params, ids, sizes))
        predictions += int(np.maximum(lengths - 1, 0).sum())
        rows += int((lengths > 0).sum())
    return float(np.sum(jax.device_get(total), dtype=np.float64)), predictions, rows


def _mine(rows: int) -> slice:
    """The rows of a global batch that this process feeds."""
    share = rows // jax.process_count()
    return slice(jax.process_index() * share, (jax.process_index() + 1) * share)
