"""Shards hold what was written, and a change to them is noticed."""

import csv
import gzip
import json
import pickle
import shutil

import numpy as np
import pytest

from depthjax.data import load_tokenizer, open_shards, write_index
from depthjax.data import progress as progress_module
from depthjax.data.shards import Shard, TokenSplit, token_dtype
from depthjax.errors import InputError

NEOX_EOS = 50279


@pytest.fixture
def shards(prepared, tmp_path):
    """A copy of the prepared directory to damage."""
    return shutil.copytree(prepared, tmp_path / "shards")


@pytest.fixture
def bare(tmp_path):
    """A directory as DepthBench writes it: headerless uint16 files, of which one is held out."""
    rng = np.random.default_rng(0)
    for name, size in [("000_00000", 1000), ("000_00001", 700), ("013_00008", 300)]:
        ids = rng.integers(2, 50277, size).astype("<u2")
        ids[99::100] = NEOX_EOS
        ids.tofile(tmp_path / f"{name}.npy")
    return tmp_path


def edit_index(directory, change):
    path = directory / "index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def test_the_layout_on_disk_is_olmo_core_s(prepared):
    index = json.loads((prepared / "index.json").read_text())
    assert len(index["shards"]) > 2
    for record in index["shards"]:
        ids = np.fromfile(prepared / record["file"], "<u2")
        assert (len(ids), ids.max()) == (record["tokens"], record["max_id"])
        spans = prepared / record["file"].replace(".npy", ".csv.gz")
        with gzip.open(spans, "rt") as lines:
            bounds = [(int(start), int(end)) for start, end in csv.reader(lines)]
        ends = [end for _, end in bounds]
        assert [start for start, _ in bounds] == [0, *ends[:-1]]
        assert ends[-1] == len(ids)
        assert len(ends) == record["documents"]
        assert all(ids[end - 1] == index["eos_id"] for end in ends)


def test_ids_beyond_uint16_take_uint32():
    assert token_dtype(65536) == np.dtype("<u2")
    assert token_dtype(65537) == np.dtype("<u4")


def test_windows_tile_each_shard_and_never_span_two(prepared):
    train = open_shards(prepared).train
    windows = train.windows(64)
    tiles = []
    for shard in train.shards:
        ids = np.fromfile(shard.path, "<u2")
        tiles.append(ids[: len(ids) // 64 * 64].reshape(-1, 64))
    expected = np.concatenate(tiles)
    assert len(windows) == len(expected)
    gathered = windows.gather(np.arange(len(windows)))
    assert gathered.dtype == windows[0].dtype == np.int32
    assert np.array_equal(gathered, expected)
    assert all(np.array_equal(window, row) for window, row in zip(windows, expected, strict=True))


def test_windows_survive_pickling_without_their_maps(prepared):
    windows = open_shards(prepared).train.windows(64)
    before = windows[5]
    data = pickle.dumps(windows)
    assert len(data) < 2000
    assert np.array_equal(pickle.loads(data)[5], before)


def test_windows_end_with_an_index_error(prepared):
    windows = open_shards(prepared).train.windows(64)
    for index in (-1, len(windows)):
        with pytest.raises(IndexError):
            windows[index]


def test_a_context_longer_than_every_shard_is_refused(prepared):
    with pytest.raises(InputError, match=r"model.context = 9999 tokens is longer than every train"):
        open_shards(prepared).train.windows(9999)


def test_unigram_counts_count_every_token(prepared):
    train = open_shards(prepared).train
    ids = np.concatenate(list(train.documents()))
    counts = train.unigram_counts(8192)
    assert counts.dtype == np.int64
    assert np.array_equal(counts, np.bincount(ids, minlength=8192))
    with pytest.raises(InputError, match=r"token id \d+, outside a vocabulary of 100"):
        train.unigram_counts(100)


def test_documents_without_spans_are_cut_after_each_end_of_text(shards):
    listed = [ids.tolist() for ids in open_shards(shards).train.documents()]
    for spans in shards.glob("*.csv.gz"):
        spans.unlink()
    with pytest.raises(InputError, match=r"csv.gz is missing or has another checksum"):
        open_shards(shards)
    cut = open_shards(shards, verify=False).train.documents()
    assert [ids.tolist() for ids in cut] == listed


def test_a_last_document_without_end_of_text_is_kept(tmp_path):
    np.array([5, 0, 6], "<u2").tofile(tmp_path / "a.npy")
    split = TokenSplit("train", (Shard(tmp_path / "a.npy", "<u2", 3),), eos_id=0, pad_id=1)
    assert [ids.tolist() for ids in split.documents()] == [[5, 0], [6]]


@pytest.mark.parametrize("spans", ["0,5\n5,99999\n", "start,end\n0,5\n", "7\n", "3,3\n"])
def test_spans_that_do_not_fit_are_refused(shards, spans):
    with gzip.open(shards / "train-00000.csv.gz", "wt") as file:
        file.write(spans)
    with pytest.raises(InputError, match=r"train-00000.csv.gz is damaged"):
        list(open_shards(shards, verify=False).train.documents())
    with pytest.raises(InputError, match=r"train-00000.csv.gz .* another checksum"):
        open_shards(shards)


def test_one_flipped_bit_is_noticed_anywhere(shards):
    path = shards / "heldout-00000.npy"
    data = bytearray(path.read_bytes())
    for place in (0, len(data) // 2, len(data) - 1):
        data[place] ^= 1
        path.write_bytes(data)
        with pytest.raises(InputError, match=r"heldout-00000.npy has another checksum"):
            open_shards(shards)
        data[place] ^= 1
    assert open_shards(shards, verify=False).tokenizer == "bpe8k"


def test_a_truncated_shard_is_noticed_without_reading_it(shards):
    path = shards / "train-00001.npy"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(InputError, match=r"train-00001.npy has \d+ bytes where index.json says"):
        open_shards(shards, verify=False)


def test_a_missing_shard_is_named(shards):
    (shards / "train-00001.npy").unlink()
    with pytest.raises(InputError, match=r"train-00001.npy is missing, though index.json lists it"):
        open_shards(shards)


def test_a_token_beyond_the_model_s_vocabulary_is_named(prepared):
    top = int(max(ids.max() for ids in open_shards(prepared).train.documents()))
    assert open_shards(prepared, vocab_size=top + 1)
    with pytest.raises(InputError, match=rf"holds token id {top}, outside a vocabulary of {top}"):
        open_shards(prepared, vocab_size=top)


def test_another_tokenizer_is_refused(prepared):
    bpe, neox = load_tokenizer("bpe8k"), load_tokenizer("neox")
    assert open_shards(prepared, tokenizer_sha256=bpe.sha256).tokenizer_sha256 == bpe.sha256
    with pytest.raises(InputError, match=rf"made with tokenizer bpe8k .* not .*{neox.sha256[:12]}"):
        open_shards(prepared, tokenizer_sha256=neox.sha256)


def test_shards_without_training_tokens_are_refused(shards):
    edit_index(shards, lambda index: [r.update(split="heldout") for r in index["shards"]])
    with pytest.raises(InputError, match="hold no training tokens"):
        open_shards(shards)


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.update(version=2),
        lambda index: index.pop("eos_id"),
        lambda index: index["shards"][0].pop("sha256"),
        lambda index: index.update(dtype="text"),
    ],
)
def test_an_index_of_another_form_is_refused(shards, change):
    edit_index(shards, change)
    with pytest.raises(InputError, match=r"index.json is not an index that this version reads"):
        open_shards(shards)


def test_a_directory_without_shards_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"data.dir = .*nowhere is not a directory"):
        open_shards(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"holds no token shards; make them with `depthjax data"):
        open_shards(tmp_path)


def test_depthbench_s_own_directory_opens_unchanged(bare):
    shards = open_shards(bare)
    assert (shards.train.tokens, shards.heldout.tokens) == (1700, 300)
    assert (shards.tokenizer, shards.vocab_size) == ("neox", 50280)
    assert (shards.eos_id, shards.pad_id) == (NEOX_EOS, 1)
    assert [len(ids) for ids in shards.heldout.documents()] == [100, 100, 100]
    assert open_shards(bare, heldout="*_00001*").heldout.tokens == 700


def test_bare_shards_are_scanned_for_ids_outside_the_vocabulary(bare):
    np.array([5, 60000, 5], "<u2").tofile(bare / "000_00002.npy")
    with pytest.raises(InputError, match=r"000_00002.npy holds token id 60000, outside"):
        open_shards(bare)
    (bare / "000_00002.npy").write_bytes(b"odd")
    with pytest.raises(InputError, match=r"has 3 bytes, not a whole number of uint16 tokens"):
        open_shards(bare)


def test_a_real_npy_file_is_told_apart(bare):
    np.save(bare / "000_00002.npy", np.arange(10))
    with pytest.raises(InputError, match=r"000_00002.npy is a real NumPy file with a header"):
        open_shards(bare)


def test_an_index_is_added_beside_shards_that_stay_as_they_are(bare):
    before = {path.name: path.read_bytes() for path in bare.iterdir()}
    neox = load_tokenizer("neox")
    written = write_index(bare, neox)
    after = {path.name: path.read_bytes() for path in bare.iterdir()}
    index = json.loads(after.pop("index.json"))
    assert after == before
    assert [record["documents"] for record in index["shards"]] == [10, 7, 3]
    assert written == open_shards(bare, tokenizer_sha256=neox.sha256)
    assert (written.train.tokens, written.heldout.tokens) == (1700, 300)
    with pytest.raises(InputError, match=r"index.json exists; remove it"):
        write_index(bare, neox)


def test_an_index_for_the_wrong_tokenizer_is_not_written(bare):
    with pytest.raises(InputError, match=r"token id \d+, outside a vocabulary of 8192"):
        write_index(bare, load_tokenizer("bpe8k"))
    assert not (bare / "index.json").exists()


def test_verifying_much_data_shows_a_bar_on_stderr(prepared, monkeypatch, capsys):
    open_shards(prepared)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(progress_module, "WORTH_A_BAR", 1)
    open_shards(prepared)
    out, err = capsys.readouterr()
    assert out == ""
    assert "verifying" in err
    assert "100%" in err
