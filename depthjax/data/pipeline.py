"""Batches of token windows: shuffled for training, in order for validation."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from depthjax.data.shards import TokenSplit, TokenWindows
from depthjax.errors import InputError

READ_THREADS = 2


def global_batches(
    windows: TokenWindows,
    *,
    batch: int,
    seed: int,
    rows: Sequence[int] | None = None,
    prefetch: int = 8,
):
    """Return the endless training batches as a grain IterDataset of int32[rows, context].

    `rows` are those of a global batch that are wanted here (None: all); the others are not read.
    The global batches, their row order included, depend only on the windows, `batch` and `seed`.
    Each epoch visits the windows once in an order of its own, less the up to batch-1 windows that
    do not fill a last batch. An iterator's state is `{"next_index": k}`, valid for any `rows`.
    `prefetch` batches are read ahead in threads.

    Raises InputError if `batch` is not positive or exceeds the windows.
    """
    import grain

    if batch < 1:
        raise InputError(f"train.batch = {batch} sequences must be at least 1")
    if batch > len(windows):
        raise InputError(
            f"train.batch = {batch} sequences exceeds the {len(windows)} windows of model.context "
            f"= {windows.context} tokens in data.dir; lower one of them or prepare more text"
        )
    epoch = grain.MapDataset.range(len(windows)).seed(seed).shuffle()
    order = epoch[: len(windows) // batch * batch].repeat(None)
    wanted = np.arange(batch) if rows is None else np.asarray(rows)
    options = grain.ReadOptions(num_threads=READ_THREADS, prefetch_buffer_size=prefetch)
    read = order.batch(batch).map(lambda indices: windows.gather(indices[wanted]))
    return read.to_iter_dataset(options)


def heldout_windows(
    split: TokenSplit, context: int, batch: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield `split` in order as (rows int32[batch, context], real bool[batch]), without overlap.

    The last batch is filled up with rows of padding, for which `real` is false. Raises InputError
    if the split has no tokens or no shard holds `context` of them.
    """
    _check_heldout(split, batch)
    windows = split.windows(context)
    rows = (windows[index] for index in range(len(windows)))
    return ((block, lengths > 0) for block, lengths in _padded(rows, split.pad_id, context, batch))


def heldout_documents(
    split: TokenSplit, context: int, batch: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield `split` as (rows int32[batch, context], lengths int32[batch]), one document a row.

    A document is cut off after `context` tokens and padded on the right; `lengths` counts the
    tokens left, 0 for the rows that fill up the last batch. This is DepthBench's validation set.
    Raises InputError if the split has no tokens.
    """
    _check_heldout(split, batch)
    return _padded(split.documents(), split.pad_id, context, batch)


def _check_heldout(split: TokenSplit, batch: int) -> None:
    if not split.tokens:
        raise InputError(f"data.dir has no tokens in its {split.name} split to evaluate on")
    if batch < 1:
        raise InputError(f"batch = {batch} sequences must be at least 1")


def _padded(
    rows: Iterable[np.ndarray], pad_id: int, context: int, batch: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield `rows` cut and padded to int32[batch, context], with the length of each."""
    rows = iter(rows)
    while True:
        block = np.full((batch, context), pad_id, np.int32)
        lengths = np.zeros(batch, np.int32)
        for i, row in zip(range(batch), rows):  # noqa: B905, the last batch may be short
            lengths[i] = min(len(row), context)
            block[i, : lengths[i]] = row[:context]
        if not lengths.any():
            return
        yield block, lengths
        if not lengths[-1]:
            return
