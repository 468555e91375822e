"""Preparing writes every document once, wherever and however often it is interrupted."""

import gzip
import json
import lzma
import os
import signal
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from depthjax.data import default_corpus, embedded_documents, load_tokenizer, open_shards, prepare
from depthjax.data import progress as progress_module
from depthjax.errors import InputError

OPTIONS = {"tokenizer": "bpe8k", "progress": False}


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def lists(split):
    return [ids.tolist() for ids in split.documents()]


def write_as(kind, texts, folder):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if kind == "parquet":
        table = pyarrow.table({"text": texts})
        pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=7)
    elif kind == "txt":
        for i, text in enumerate(texts):
            (folder / f"{i:03d}.txt").write_bytes(text.encode())
    else:
        pack = {"jsonl": bytes, "gz": gzip.compress, "xz": lzma.compress}
        pack["zst"] = zstandard.ZstdCompressor().compress
        suffix = "jsonl" if kind == "jsonl" else f"jsonl.{kind}"
        (folder / f"a.{suffix}").write_bytes(pack[kind](lines))


@pytest.mark.parametrize("kind", ["txt", "jsonl", "gz", "xz", "zst", "parquet"])
def test_every_document_is_read_back_with_each_tenth_held_out(tmp_path, texts, kind):
    source = tmp_path / "source"
    source.mkdir()
    write_as(kind, texts, source)
    summary = prepare(source, tmp_path / "out", shard_tokens=1500, **OPTIONS)
    shards = open_shards(tmp_path / "out")
    expected = [ids.tolist() for ids in load_tokenizer("bpe8k").encode_documents(texts)]
    assert lists(shards.heldout) == expected[::10]
    assert lists(shards.train) == [ids for i, ids in enumerate(expected) if i % 10]
    assert (summary.documents, summary.reused) == (60, False)
    assert summary.train_tokens == shards.train.tokens
    assert summary.heldout_tokens == shards.heldout.tokens
    assert summary.shards == len(shards.train.shards) + len(shards.heldout.shards)


def test_a_train_shard_ends_with_the_document_that_fills_it(prepared):
    for shard in open_shards(prepared).train.shards[:-1]:
        *_, (start, end) = shard.spans(eos_id=0)
        assert start < 1500 <= end == shard.tokens


def test_the_tokenizer_is_saved_with_its_digest(prepared):
    saved = load_tokenizer(prepared / "tokenizer.json")
    assert saved.sha256 == open_shards(prepared).tokenizer_sha256


def test_batches_and_their_sizes_leave_no_trace(tmp_path, text_tree, prepared, monkeypatch):
    monkeypatch.setattr(sys.modules["depthjax.data.prepare"], "_BATCH_CHARACTERS", 100)
    prepare(text_tree, tmp_path / "out", shard_tokens=1500, **OPTIONS)
    assert contents(tmp_path / "out") == contents(prepared)


KILLED = """
import os, signal, sys
from depthjax.data import prepare

renames, replace = 0, os.replace

def replace_or_die(*paths):
    global renames
    renames += 1
    if renames == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)

os.replace = replace_or_die
prepare(sys.argv[1], sys.argv[2], tokenizer="bpe8k", shard_tokens=1500, progress=False)
"""


def test_killed_before_any_of_its_renames_a_run_ends_with_the_same_bytes(
    tmp_path, text_tree, prepared
):
    """Run k dies at its k-th rename: of the manifest, of a shard or its spans, of the index."""
    out, statuses = tmp_path / "out", []
    while 0 not in statuses and len(statuses) < 30:
        command = [sys.executable, "-c", KILLED, text_tree, out, str(len(statuses) + 1)]
        statuses.append(subprocess.run(command, timeout=60).returncode)
        assert not (out / "index.json").exists() or contents(out) == contents(prepared)
    assert set(statuses) == {-signal.SIGKILL, 0}
    assert len(statuses) > 6
    assert contents(out) == contents(prepared)


def test_a_complete_directory_is_left_alone(tmp_path, text_tree, prepared, capsys):
    options = {"tokenizer": "bpe8k", "shard_tokens": 1500}
    times = {path: path.stat().st_mtime_ns for path in prepared.iterdir()}
    summary = prepare(text_tree, prepared, **options)
    assert summary.reused
    assert summary.documents == 60
    assert {path: path.stat().st_mtime_ns for path in prepared.iterdir()} == times
    assert "is complete already; nothing to do" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_tokens": 1501}, "begun with shard_tokens = 1500, not 1501"),
        ({"heldout_every": 5}, "begun with heldout_every = 10, not 5"),
        ({"tokenizer": "neox"}, "begun with tokenizer = .*bpe8k.*, not .*neox"),
        ({"text_key": "body"}, "begun with text_key = 'text', not 'body'"),
    ],
)
def test_other_options_are_refused_in_a_begun_directory(text_tree, prepared, options, message):
    with pytest.raises(InputError, match=message):
        prepare(text_tree, prepared, **{**OPTIONS, "shard_tokens": 1500, **options})


def test_other_inputs_are_refused_in_a_begun_directory(text_tree, prepared):
    with pytest.raises(InputError, match=r"begun with other inputs, among them .*040.txt of \d+"):
        prepare([text_tree / "0", text_tree / "1"], prepared, shard_tokens=1500, **OPTIONS)
    folders = [text_tree / "1", text_tree / "0", text_tree / "2"]
    with pytest.raises(InputError, match="60 input files, not 60 or in another order"):
        prepare(folders, prepared, shard_tokens=1500, **OPTIONS)


def test_options_may_change_while_nothing_is_finished(tmp_path, texts):
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_text('{"text": "one"}\n{"text": "two"}\nbroken\n')
    with pytest.raises(InputError, match=r"a.jsonl:3"):
        prepare(source, out, **OPTIONS)
    assert not list(out.glob(".*")) + list(out.glob("*.npy"))
    source.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert prepare(source, out, heldout_every=2, **OPTIONS).documents == 2


def test_a_directory_of_other_files_is_never_touched(tmp_path, text_tree):
    (tmp_path / "train-00000.npy").write_bytes(b"mine")
    with pytest.raises(InputError, match="holds files that are not a preparation's"):
        prepare(text_tree, tmp_path, **OPTIONS)
    with pytest.raises(InputError, match="holds files that are not a preparation's"):
        prepare(text_tree, tmp_path / "train-00000.npy", **OPTIONS)
    assert contents(tmp_path) == {"train-00000.npy": b"mine"}


def test_the_output_may_lie_within_the_input(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    first, again = (prepare(tmp_path, tmp_path / "out", **OPTIONS) for _ in range(2))
    with pytest.raises(InputError, match="every input lies within the output directory"):
        prepare(tmp_path / "out", tmp_path / "out", **OPTIONS)
    assert (first.documents, first.reused) == (again.documents, not again.reused) == (2, False)


def test_a_damaged_manifest_or_lost_shard_is_named(tmp_path, text_tree):
    out = tmp_path / "out"
    prepare(text_tree, out, shard_tokens=1500, **OPTIONS)
    manifest = (out / "manifest.jsonl").read_text()
    (out / "train-00000.npy").unlink()
    with pytest.raises(InputError, match=r"train-00000.npy is missing, though manifest.jsonl"):
        prepare(text_tree, out, shard_tokens=1500, **OPTIONS)
    (out / "manifest.jsonl").write_text(manifest[:-20])
    with pytest.raises(InputError, match=r"manifest.jsonl is damaged"):
        prepare(text_tree, out, shard_tokens=1500, **OPTIONS)


def test_whole_files_are_held_out_by_name(tmp_path, text_tree, texts):
    prepare(text_tree, tmp_path / "out", heldout_files="01*", **OPTIONS)
    shards = open_shards(tmp_path / "out")
    expected = load_tokenizer("bpe8k").encode_documents(texts)
    assert lists(shards.heldout) == [ids.tolist() for ids in expected[10:20]]
    assert shards.train.tokens == sum(map(len, expected)) - shards.heldout.tokens


@pytest.mark.parametrize(("glob", "some"), [("*.pdf", "no"), ("*.txt", "every")])
def test_a_glob_that_splits_nothing_is_refused(tmp_path, text_tree, glob, some):
    with pytest.raises(InputError, match=rf"heldout_files = .* matches {some} input file"):
        prepare(text_tree, tmp_path / "out", heldout_files=glob, **OPTIONS)


def test_a_corpus_too_small_to_split_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(InputError, match=r"0 documents were found in 1 files, .*a.jsonl first"):
        prepare(tmp_path / "a.jsonl", tmp_path / "out", **OPTIONS)
    (tmp_path / "b.jsonl").write_text('{"text": "alone"}\n')
    with pytest.raises(InputError, match="at least two documents are needed"):
        prepare(tmp_path / "b.jsonl", tmp_path / "out", **OPTIONS)
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    with pytest.raises(InputError, match=r"the heldout files, .* hold no documents"):
        prepare(tmp_path, tmp_path / "out", heldout_files="a.*", **OPTIONS)


@pytest.mark.parametrize(("option", "value"), [("heldout_every", 1), ("shard_tokens", 0)])
def test_options_out_of_range_are_refused(tmp_path, text_tree, option, value):
    with pytest.raises(InputError, match=rf"{option} = {value} must be at least"):
        prepare(text_tree, tmp_path / "out", **{option: value}, **OPTIONS)


def test_progress_is_plain_lines_off_a_terminal(tmp_path, text_tree, monkeypatch, capsys):
    monkeypatch.setattr(progress_module, "LINE_SECONDS", 0.0)
    prepare(text_tree, tmp_path / "out", tokenizer="bpe8k")
    out, err = capsys.readouterr()
    assert out == ""
    first, *_, late, last = err.splitlines()
    assert first.startswith("1 documents, ")
    assert "tokens/s, 0/60 sources" in first
    assert "59/60 sources, about 0 min left" in late
    assert last.startswith("60 documents, ")
    assert last.endswith(" tokens/s, 60/60 sources")


def test_progress_is_a_bar_on_a_terminal(tmp_path, text_tree, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "150")
    prepare(text_tree, tmp_path / "out", tokenizer="bpe8k")
    out, err = capsys.readouterr()
    assert out == ""
    assert "60 documents" in err


def test_the_default_corpus_is_prepared_once_though_two_processes_ask(tmp_path):
    code = "from depthjax.data import default_corpus; print(default_corpus('bpe8k'))"
    environment = {**os.environ, "DEPTHJAX_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", code]
    pipes = {"stdout": subprocess.PIPE, "text": True, "env": environment}
    racers = [subprocess.Popen(command, **pipes) for _ in range(2)]
    printed = [racer.communicate(timeout=60)[0].strip() for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert printed[0] == printed[1]
    assert sorted(path.name[:5] for path in tmp_path.iterdir()) == ["bpe8k", "sotu-"]
    documents = sorted(
        [*lists(open_shards(printed[0]).train), *lists(open_shards(printed[0]).heldout)]
    )
    encoded = load_tokenizer("bpe8k").encode_documents(embedded_documents())
    assert documents == sorted(ids.tolist() for ids in encoded)


def test_the_default_corpus_is_reused():
    directory = default_corpus("bpe8k")
    before = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert default_corpus("bpe8k") == directory
    assert {path: path.stat().st_mtime_ns for path in directory.iterdir()} == before
