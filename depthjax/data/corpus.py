"""Reading documents: text, JSON lines and Parquet files, local or behind any fsspec URL."""

import gzip
import json
import lzma
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources

from depthjax.errors import InputError

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst", ".parquet")
EMBEDDED_CORPUS = "sotu_1m.jsonl.xz"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Source:
    """One file of documents: absolute path or URL, its suffix from SUFFIXES, its size in bytes."""

    path: str
    suffix: str
    size: int

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.rsplit("/", 1)[-1]


def find_sources(inputs: str | os.PathLike | Iterable[str | os.PathLike]) -> list[Source]:
    """Return the files that `inputs` name, in the order given; a file named twice counts once.

    An input is a file, a directory (every file below it with a suffix from SUFFIXES, sorted by
    path), or a URL of either that fsspec opens, such as
    `hf://datasets/HuggingFaceFW/fineweb-edu/sample/100BT`. Raises InputError if an input is
    missing, is a file of another kind, or is a directory that holds none.
    """
    inputs = [inputs] if isinstance(inputs, (str, os.PathLike)) else inputs
    found = {source.path: source for item in inputs for source in _expand(os.fspath(item))}
    if not found:
        raise InputError("no input was named; give at least one file, directory or URL")
    return list(found.values())


def read_documents(source: Source, skip: int = 0, text_key: str = "text") -> Iterator[str]:
    """Yield the documents of `source` after the first `skip`, holding only a few at a time.

    A .txt file is one document. In JSON lines and Parquet each line or row is one, its text under
    `text_key`; blank lines are not documents. Skipped documents are not decoded, and in Parquet
    skipped row groups are not read. Raises InputError for damaged data, invalid UTF-8, and a line
    or row without text, naming the place.
    """
    if source.suffix == ".parquet":
        return _parquet_documents(source, skip, text_key)
    if source.suffix == ".txt":
        return _text_document(source, skip)
    return _json_documents(source, skip, text_key)


def embedded_documents() -> list[str]:
    """Return the corpus shipped with depthjax: 25 presidential messages to Congress, 1792-1928."""
    with resources.as_file(resources.files("depthjax") / "assets" / EMBEDDED_CORPUS) as path:
        return [text for source in find_sources(path) for text in read_documents(source)]


def _expand(location: str) -> list[Source]:
    """Return the sources at one path or URL."""
    from fsspec.core import url_to_fs

    try:
        fs, root = url_to_fs(location)
        info = fs.info(root)
    except FileNotFoundError as error:
        raise InputError(f"{location}: no such file or directory") from error
    except ImportError as error:
        raise InputError(_missing_package(location, error)) from error
    except ValueError as error:  # an unknown protocol, or a URL its file system cannot parse
        raise InputError(f"{location}: cannot be opened: {error}") from error
    kinds = ", ".join(SUFFIXES)
    if info["type"] != "directory":
        if not (suffix := _suffix(root)):
            raise InputError(f"{location}: not a file of documents, which end in one of {kinds}")
        return [Source(_full_path(fs, root), suffix, info["size"])]
    files = sorted(fs.find(root, detail=True).items())
    sources = [
        Source(_full_path(fs, path), suffix, entry["size"])
        for path, entry in files
        if (suffix := _suffix(path))
    ]
    if not sources:
        raise InputError(f"{location}: the directory holds no file that ends in one of {kinds}")
    return sources


def _suffix(path: str) -> str | None:
    return next((suffix for suffix in SUFFIXES if path.endswith(suffix)), None)


def _full_path(fs, path: str) -> str:
    from fsspec.implementations.local import LocalFileSystem

    return path if isinstance(fs, LocalFileSystem) else fs.unstrip_protocol(path)


def _missing_package(path: str, error: ImportError) -> str:
    return f'{path}: needs a package that is missing ({error}); pip install "depthjax[data]"'


@contextmanager
def _open(source: Source):
    """Open a source's bytes as stored, turning signs of damage into InputError."""
    import fsspec

    try:
        with fsspec.open(source.path, "rb") as file:
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise InputError(f"{source.path}: the compressed data is damaged: {error}") from error


def _text_document(source: Source, skip: int) -> Iterator[str]:
    if skip:
        return
    with _open(source) as file:
        yield _decode(file.read(), source.path, offset=0)


def _decode(data: bytes, where: str, offset: int) -> str:
    """Decode UTF-8; `offset` is the place of `data` in its file, for the error."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise InputError(
            f"{where}: invalid UTF-8, byte 0x{byte:02x} at offset {offset + error.start}"
        ) from error


def _json_documents(source: Source, skip: int, key: str) -> Iterator[str]:
    offset = 0
    for number, line in enumerate(_lines(source), start=1):
        if not line.isspace():
            if skip:
                skip -= 1
            else:
                where = f"{source.path}:{number}"
                yield _json_text(_decode(line, where, offset), where, key)
        offset += len(line)


def _json_text(line: str, where: str, key: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not a line of JSON: {error}") from error
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise InputError(f"{where}: needs an object with a string under {key!r}")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
            raise InputError(f"{where}: the text under {key!r} is not Unicode: {error}") from error
    return text


def _lines(source: Source) -> Iterator[bytes]:
    """Yield the lines of a possibly compressed file, each with its newline."""
    with _open(source) as file:
        if source.suffix == ".jsonl.zst":
            yield from _zstd_lines(file, source)
        elif source.suffix == ".jsonl.gz":
            with gzip.open(file) as lines:
                yield from lines
        elif source.suffix == ".jsonl.xz":
            with lzma.open(file) as lines:
                yield from lines
        else:
            yield from file


def _zstd_lines(file, source: Source) -> Iterator[bytes]:
    """Yield the lines of zstd frames; unlike the library's own reader, notice a missing end."""
    try:
        import zstandard
    except ImportError as error:
        raise InputError(_missing_package(source.path, error)) from error

    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = decompressor.decompressobj()
    line = b""
    try:
        while data := file.read(_CHUNK):
            while data:
                if frame.eof:
                    frame = decompressor.decompressobj()
                *lines, line = (line + frame.decompress(data)).split(b"\n")
                yield from (complete + b"\n" for complete in lines)
                data = frame.unused_data
    except zstandard.ZstdError as error:
        raise InputError(f"{source.path}: the compressed data is damaged: {error}") from error
    if not frame.eof:
        raise EOFError("it ends within a frame")
    if line:
        yield line


def _parquet_documents(source: Source, skip: int, key: str) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(_missing_package(source.path, error)) from error

    row = 0
    with _open(source) as file:
        try:
            table = pyarrow.parquet.ParquetFile(file, buffer_size=_CHUNK, pre_buffer=False)
            groups = _groups_after(table, skip)
            row = sum(table.metadata.row_group(i).num_rows for i in range(groups.start))
            _check_column(table.schema_arrow, source.path, key)
            for batch in table.iter_batches(256, row_groups=groups, columns=[key]):
                for value in batch.column(0):
                    if row >= skip:
                        yield _cell_text(value, f"{source.path}: row {row}", key)
                    row += 1
        except pyarrow.ArrowInvalid as error:
            raise InputError(f"{source.path}: not a readable Parquet file: {error}") from error


def _groups_after(table, skip: int) -> range:
    """Return the row groups that hold rows after the first `skip`."""
    first = 0
    while first < table.num_row_groups and table.metadata.row_group(first).num_rows <= skip:
        skip -= table.metadata.row_group(first).num_rows
        first += 1
    return range(first, table.num_row_groups)


def _check_column(schema, path: str, key: str) -> None:
    import pyarrow.types as types

    if key not in schema.names:
        raise InputError(f"{path}: no column {key!r}; the columns are {', '.join(schema.names)}")
    kind = schema.field(key).type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise InputError(f"{path}: column {key!r} holds {kind}, not strings")


def _cell_text(value, where: str, key: str) -> str:
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: invalid UTF-8 under {key!r}: {error}") from error
    if text is None:
        raise InputError(f"{where}: no text under {key!r}")
    return text
