"""Held-out losses: the true mean, the DepthBench authors' definition, and a unigram yardstick."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from depthjax.config import Config
from depthjax.data import heldout_documents, heldout_windows
from depthjax.data.shards import TokenShards, TokenSplit
from depthjax.interop import is_model_folder
from depthjax.parallel import make_mesh
from depthjax.parallel.processes import rows_here
from depthjax.plan import with_mesh
from depthjax.train.inputs import open_data
from depthjax.train.source import newest_state, parameters_of_folder
from depthjax.train.step import Program
from depthjax.train.stop import StopSignal


@dataclasses.dataclass(frozen=True)
class HeldoutLosses:
    """Nats a token."""

    heldout_loss: float
    """Mean over every prediction in non-overlapping windows of the held-out stream."""
    heldout_loss_authors: float
    """One instance a document, cut at the context; the losses are divided by all its tokens,
    although the last has no prediction (DepthBench's code): a little lower than a true
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
    """Held-out losses of what is in `config.run.dir`: a model folder, or a run, whose newest
    checkpoint is taken and its step returned as well.

    Raises InputError where there is neither or the data do not fit.
    """
    mesh = make_mesh(with_mesh(config, jax.devices()))
    shards, vocab = open_data(config)
    program = Program(config, vocab, mesh)
    if is_model_folder(config.run.dir):
        params, counts = parameters_of_folder(config, program, vocab, config.run.dir), {}
    else:
        state = newest_state(config, program, say)
        params, counts = state.params, {"step": int(state.step)}
    losses = heldout_losses(program, params, shards, vocab, config.run.eval_batches)
    return {**counts, **dataclasses.asdict(losses)}


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
        mine = rows_here(program.by_row, len(lengths))
        ids, sizes = program.put(input_ids[mine]), program.put(lengths[mine].astype(np.int32))
        total.append(program.heldout(params, ids, sizes))
        predictions += int(np.maximum(lengths - 1, 0).sum())
        rows += int((lengths > 0).sum())
    return float(np.sum(jax.device_get(total), dtype=np.float64)), predictions, rows
