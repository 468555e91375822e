"""Documents come out as they went in, and what cannot be read is named."""

import gzip
import json
import lzma
import sys

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from depthjax.data import embedded_documents, find_sources, read_documents
from depthjax.errors import InputError

COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def write_jsonl(path, texts, suffix=""):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    path.write_bytes(COMPRESS[suffix](lines.encode()))
    return path


def write_parquet(path, texts, **options):
    table = pyarrow.table({"n": list(range(len(texts))), "text": texts})
    pyarrow.parquet.write_table(table, path, **options)
    return path


def read(inputs, **options):
    return [text for source in find_sources(inputs) for text in read_documents(source, **options)]


def test_a_tree_is_read_in_path_order_and_byte_for_byte(text_tree, texts):
    assert read(text_tree) == texts


@pytest.mark.parametrize("suffix", COMPRESS)
def test_json_lines_are_read_and_skipped(tmp_path, texts, suffix):
    path = write_jsonl(tmp_path / f"a.jsonl{suffix}", texts, suffix)
    assert read(path) == texts
    for skip in (1, 59, 60, 61):
        assert read(path, skip=skip) == texts[skip:]


def test_concatenated_zstd_frames_and_a_last_line_without_newline_are_read(tmp_path):
    frames = (b'{"text": "a"}\n{"te', b'xt": "b"}', b'\n\n{"text": "c"}')
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"".join(map(zstandard.ZstdCompressor().compress, frames)))
    assert read(path) == ["a", "b", "c"]


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()])
def test_parquet_is_read_and_skipped_across_row_groups(tmp_path, texts, kind):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": pyarrow.array(texts, kind)})
    pyarrow.parquet.write_table(table, path, row_group_size=7)
    for skip in (0, 6, 7, 8, 59, 60, 99):
        assert read(path, skip=skip) == texts[skip:]


def test_another_key_can_hold_the_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "x", "text": "y"}\n')
    assert read(path, text_key="content") == ["x"]


def test_urls_of_any_file_system_are_read():
    with fsspec.open("memory://corpus/b/1.txt", "wb") as file:
        file.write(b"second")
    with fsspec.open("memory://corpus/a.jsonl", "wb") as file:
        file.write(b'{"text": "first"}\n')
    assert read("memory://corpus") == ["first", "second"]
    assert read(["memory://corpus/b/1.txt", "memory://corpus/a.jsonl"]) == ["second", "first"]


def test_a_file_named_twice_counts_once(text_tree, texts):
    assert read([text_tree / "0", text_tree]) == texts


def test_only_a_few_documents_are_held_at_a_time(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["x"])
    with open(path, "a") as file:
        file.write("broken\n")
    documents = read_documents(find_sources(path)[0])
    assert next(documents) == "x"
    with pytest.raises(InputError, match=r"a.jsonl:2: not a line of JSON"):
        next(documents)


def test_the_embedded_corpus_has_25_messages_of_1_mb():
    documents = embedded_documents()
    assert len(documents) == 25
    assert 1_000_000 < sum(len(text.encode()) for text in documents) < 1_050_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"abc\xffdef", r"a.txt: invalid UTF-8, byte 0xff at offset 3"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xe9"}\n', r"a.jsonl:2: invalid .* at offset 24"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text": \n', r"a.jsonl:3: not a line of JSON"),
        ("a.jsonl", b'{"body": "x"}\n', r"a.jsonl:1: needs an object with a string under 'text'"),
        ("a.jsonl", b'{"text": null}\n', r"a.jsonl:1: needs an object with a string"),
        ("a.jsonl", b'["text"]\n', r"a.jsonl:1: needs an object with a string"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a.jsonl:1: the text under 'text' is not Unicode"),
        ("a.jsonl.gz", b"plain", r"a.jsonl.gz: the compressed data is damaged"),
        ("a.jsonl.xz", b"plain", r"a.jsonl.xz: the compressed data is damaged"),
        ("a.jsonl.zst", b"plain", r"a.jsonl.zst: the compressed data is damaged"),
        ("a.parquet", b"plain", r"a.parquet: not a readable Parquet file"),
        ("a.pdf", b"", r"a.pdf: not a file of documents, which end in one of .txt, .jsonl"),
    ],
)
def test_unreadable_input_is_named_with_the_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read(tmp_path / name)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_a_compressed_file_cut_short_is_noticed(tmp_path, texts, suffix):
    path = write_jsonl(tmp_path / f"a.jsonl{suffix}", texts, suffix)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match=r"the compressed data is damaged"):
        read(path)


def test_parquet_without_text_is_named(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ["x", None])
    with pytest.raises(InputError, match=r"a.parquet: row 1: no text under 'text'"):
        read(path)
    with pytest.raises(InputError, match=r"no column 'body'; the columns are n, text"):
        read(path, text_key="body")
    with pytest.raises(InputError, match=r"column 'n' holds int64, not strings"):
        read(path, text_key="n")


def test_nothing_to_read_is_named(tmp_path):
    with pytest.raises(InputError, match="no input was named"):
        find_sources([])
    with pytest.raises(InputError, match="nowhere: no such file or directory"):
        find_sources(tmp_path / "nowhere")
    with pytest.raises(InputError, match="the directory holds no file that ends in one of"):
        find_sources(tmp_path)
    with pytest.raises(InputError, match=r"ftq://x: cannot be opened: Protocol not known: ftq"):
        find_sources("ftq://x")


@pytest.mark.parametrize(
    ("package", "name"), [("pyarrow", "a.parquet"), ("zstandard", "a.jsonl.zst")]
)
def test_a_missing_package_names_the_extra_to_install(tmp_path, monkeypatch, package, name):
    (tmp_path / name).write_bytes(b"")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=r'pip install "depthjax\[data\]"'):
        read(tmp_path / name)


def test_a_missing_file_system_names_the_extra_to_install():
    fsspec.register_implementation("absent", "absent_package.FileSystem", clobber=True)
    with pytest.raises(InputError, match=r'absent://x: .* pip install "depthjax\[data\]"'):
        find_sources("absent://x")
