"""Batches are a function of windows, batch size, seed and step, and of nothing else."""

import json

import grain
import numpy as np
import pytest

from depthjax.data import global_batches, heldout_documents, heldout_windows, open_shards
from depthjax.data.shards import TokenSplit
from depthjax.errors import InputError

CONTEXT, BATCH, STEPS = 16, 8, 300


@pytest.fixture(scope="module")
def shards(prepared):
    return open_shards(prepared)


@pytest.fixture(scope="module")
def windows(shards):
    return shards.train.windows(CONTEXT)


@pytest.fixture(scope="module")
def reference(windows):
    """The first global batches of seed 3, which span several epochs."""
    return take(iter(global_batches(windows, batch=BATCH, seed=3)), STEPS)


def take(iterator, steps):
    return np.stack([next(iterator) for _ in range(steps)])


def keys(rows):
    return [row.tobytes() for row in rows.reshape(-1, CONTEXT)]


def test_batches_are_grain_batches_of_whole_windows(windows, reference):
    assert isinstance(global_batches(windows, batch=BATCH, seed=3), grain.IterDataset)
    assert reference.dtype == np.int32
    assert reference.shape == (STEPS, BATCH, CONTEXT)
    assert set(keys(reference)) == set(keys(windows.gather(range(len(windows)))))


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [2, 3, 6, 7], [5]])
def test_a_process_reads_its_rows_of_the_global_batches(windows, reference, rows):
    part = take(iter(global_batches(windows, batch=BATCH, seed=3, rows=rows)), STEPS)
    assert 2 * (len(windows) // BATCH) < STEPS
    assert np.array_equal(part, reference[:, rows])


def test_an_epoch_visits_every_window_once_and_each_in_its_own_order(windows):
    count = len(windows) // 4 * 4
    assert count < len(windows)
    batches = iter(global_batches(windows, batch=4, seed=0))
    first, second = (take(batches, count // 4).reshape(-1, CONTEXT) for _ in range(2))
    universe = keys(windows.gather(range(len(windows))))
    assert len(set(universe)) == len(universe)
    for epoch in (first, second):
        assert len(set(keys(epoch))) == count
    assert keys(first) != keys(second)
    assert keys(first) != universe[:count]


def test_a_batch_of_the_whole_corpus_is_a_permutation_of_it(windows):
    batch = next(iter(global_batches(windows, batch=len(windows), seed=0)))
    assert sorted(keys(batch)) == sorted(keys(windows.gather(range(len(windows)))))


def test_another_seed_gives_another_order(windows, reference):
    other = take(iter(global_batches(windows, batch=BATCH, seed=4)), 10)
    assert not np.array_equal(other, reference[:10])


@pytest.mark.parametrize("step", [1, 100, 250])
@pytest.mark.parametrize("count", [1, 2])
def test_a_resumed_run_goes_on_as_if_never_stopped_at_any_process_count(
    windows, reference, step, count
):
    """However many processes divide the rows."""
    begun = iter(global_batches(windows, batch=BATCH, seed=3))
    take(begun, step)
    state = json.loads(json.dumps(begun.get_state()))
    assert state == {"next_index": step}
    parts = [
        iter(global_batches(windows, batch=BATCH, seed=3, rows=rows))
        for rows in np.split(np.arange(BATCH), count)
    ]
    for part in parts:
        part.set_state(state)
    resumed = np.concatenate([take(part, STEPS - step) for part in parts], axis=1)
    assert np.array_equal(resumed, reference[step:])


def test_batches_that_cannot_be_are_refused(windows):
    with pytest.raises(InputError, match=r"train.batch = 9999 sequences exceeds the \d+ windows"):
        global_batches(windows, batch=9999, seed=0)
    with pytest.raises(InputError, match=r"train\.batch = 0 sequences must be at least 1"):
        global_batches(windows, batch=0, seed=0)


def test_heldout_windows_cover_the_split_in_order(shards):
    windows = shards.heldout.windows(CONTEXT)
    assert len(windows) % 5
    batches = list(heldout_windows(shards.heldout, CONTEXT, 5))
    rows, real = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    assert all(block.shape == (5, CONTEXT) for block, _ in batches)
    assert len(batches) == -(-len(windows) // 5)
    assert real.dtype == bool
    assert rows.dtype == np.int32
    assert np.array_equal(rows[real], windows.gather(range(len(windows))))
    assert (rows[~real] == shards.pad_id).all()


def test_a_full_last_batch_is_followed_by_none(shards):
    windows = shards.heldout.windows(CONTEXT)
    assert len(list(heldout_windows(shards.heldout, CONTEXT, len(windows)))) == 1


def test_heldout_documents_are_cut_and_padded_one_a_row(shards):
    documents, context = list(shards.heldout.documents()), 100
    assert {len(ids) > context for ids in documents} == {True, False}
    batches = list(heldout_documents(shards.heldout, context, 4))
    rows, lengths = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    assert len(rows) == -(-len(documents) // 4) * 4 > len(documents)
    assert (rows.dtype, lengths.dtype) == (np.int32, np.int32)
    for row, length, ids in zip(rows, lengths, documents, strict=False):
        assert length == min(len(ids), context)
        assert np.array_equal(row[:length], ids[:context])
        assert (row[length:] == shards.pad_id).all()
    assert (lengths[len(documents) :] == 0).all()
    assert (rows[len(documents) :] == shards.pad_id).all()


def test_a_split_without_tokens_or_a_batch_without_rows_is_refused(shards):
    empty = TokenSplit("heldout", (), eos_id=0, pad_id=1)
    for evaluation in (heldout_windows, heldout_documents):
        with pytest.raises(InputError, match=r"data.dir has no tokens in its heldout split"):
            evaluation(empty, CONTEXT, 4)
        with pytest.raises(InputError, match="batch = 0 sequences must be at least 1"):
            evaluation(shards.heldout, CONTEXT, 0)
