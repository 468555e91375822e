"""Token shards: files of token ids, the spans of their documents, and the index over them.

The layout is that of OLMo-core, so its shards and DepthBench's open unchanged:

    NAME.npy      token ids, little-endian uint16 (uint32 if the vocabulary exceeds 65536 ids),
                  without the header that the suffix suggests
    NAME.csv.gz   optional: a line `start,end` in tokens for each document (more fields may follow)
    index.json    depthjax's addition: the tokenizer, and each shard's split, size and checksum
"""

import bisect
import gzip
import hashlib
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from depthjax.data.files import write_atomically
from depthjax.data.progress import reading
from depthjax.data.tokenizer import Tokenizer, load_tokenizer
from depthjax.errors import InputError

INDEX = "index.json"
FORMAT, VERSION = "depthjax-tokens", 1
HELDOUT = "*013_00008*"  # the FineWeb-Edu file that DepthBench validates on
_NPY_MAGIC = b"\x93NUMPY"
_CHUNK = 1 << 24  # bytes; a multiple of every token size


@dataclass(frozen=True)
class ShardRecord:
    """What the index says of one shard; `split` is "train" or "heldout"."""

    file: str
    split: str
    tokens: int
    documents: int
    sha256: str
    max_id: int
    spans_sha256: str | None = None  # of the sidecar, if there is one


@dataclass(frozen=True)
class Shard:
    """One file of `tokens` ids of NumPy type `dtype`."""

    path: Path
    dtype: str
    tokens: int

    def memmap(self) -> np.ndarray:
        """Return the ids, mapped read-only."""
        return np.memmap(self.path, self.dtype, "r") if self.tokens else np.empty(0, self.dtype)

    def spans(self, eos_id: int) -> Iterator[tuple[int, int]]:
        """Yield `start, end` of each document, from the sidecar or else ending at each `eos_id`."""
        sidecar = spans_path(self.path)
        return self._listed_spans(sidecar) if sidecar.exists() else self._cut_spans(eos_id)

    def _listed_spans(self, sidecar: Path) -> Iterator[tuple[int, int]]:
        try:
            with gzip.open(sidecar, "rt", encoding="ascii") as lines:
                for line in lines:
                    start, end = (int(part) for part in line.split(",")[:2])
                    if not 0 <= start < end <= self.tokens:
                        raise ValueError(f"{start},{end} is no span of {self.tokens} tokens")
                    yield start, end
        except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(f"{sidecar} is damaged: {error}; remove it or restore it") from error

    def _cut_spans(self, eos_id: int) -> Iterator[tuple[int, int]]:
        ids, start, step = self.memmap(), 0, _CHUNK // 4
        for offset in range(0, self.tokens, step):
            for end in np.flatnonzero(ids[offset : offset + step] == eos_id) + (offset + 1):
                yield start, int(end)
                start = int(end)
        if start < self.tokens:
            yield start, self.tokens


@dataclass(frozen=True)
class TokenSplit:
    """The shards of one split, read in order."""

    name: str
    shards: tuple[Shard, ...]
    eos_id: int
    pad_id: int

    @property
    def tokens(self) -> int:
        """Tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)

    def windows(self, context: int) -> "TokenWindows":
        """Return the split as windows of `context` tokens; InputError if no shard holds one."""
        windows = TokenWindows(self.shards, context)
        if not len(windows):
            longest = max((shard.tokens for shard in self.shards), default=0)
            raise InputError(
                f"model.context = {context} tokens is longer than every {self.name} shard in "
                f"data.dir, of which the longest has {longest}"
            )
        return windows

    def documents(self) -> Iterator[np.ndarray]:
        """Yield each document's ids, int32[length], end of text included."""
        for shard in self.shards:
            ids = shard.memmap()
            for start, end in shard.spans(self.eos_id):
                yield ids[start:end].astype(np.int32)

    def unigram_counts(self, vocab_size: int) -> np.ndarray:
        """Return how often each id occurs, int64[vocab_size]; InputError for an id beyond it."""
        counts = np.zeros(vocab_size, np.int64)
        for shard in self.shards:
            ids = shard.memmap()
            for offset in range(0, shard.tokens, _CHUNK):
                found = np.bincount(ids[offset : offset + _CHUNK], minlength=vocab_size)
                if len(found) > vocab_size:
                    raise _id_too_large(shard.path, len(found) - 1, vocab_size)
                counts += found
        return counts


class TokenWindows:
    """Random access to the whole windows of `context` tokens in each shard, without overlap.

    A window never spans two shards: what is left at the end of each is dropped, as DepthBench does.
    Files are mapped at first use, and not pickled.
    """

    def __init__(self, shards: Sequence[Shard], context: int):
        self.shards = tuple(shards)
        self.context = context
        counts = (shard.tokens // context for shard in self.shards)
        self._first = [0, *itertools.accumulate(counts)]  # of each shard; last, the total
        self._maps: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, index: int) -> np.ndarray:
        """Return window `index` as int32[context]."""
        return self._window(index).astype(np.int32)

    def gather(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the windows at `indices` as int32[len(indices), context]."""
        rows = np.empty((len(indices), self.context), np.int32)
        for row, index in enumerate(indices):
            rows[row] = self._window(index)
        return rows

    def _window(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        number = bisect.bisect_right(self._first, index) - 1
        if number not in self._maps:
            self._maps[number] = self.shards[number].memmap()
        start = (int(index) - self._first[number]) * self.context
        return self._maps[number][start : start + self.context]

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_maps": {}}

    def __repr__(self) -> str:
        return f"TokenWindows({len(self)} of {self.context} tokens in {len(self.shards)} shards)"


@dataclass(frozen=True)
class TokenShards:
    """A directory of token shards, checked when opened."""

    directory: Path
    train: TokenSplit
    heldout: TokenSplit
    vocab_size: int
    eos_id: int
    pad_id: int
    tokenizer: str
    tokenizer_sha256: str
    sha256: str
    """Of the records of all shards: equal if the same text is cut in the same way."""


def open_shards(
    directory: str | os.PathLike,
    *,
    vocab_size: int | None = None,
    tokenizer_sha256: str | None = None,
    verify: bool = True,
    heldout: str = HELDOUT,
) -> TokenShards:
    """Open and check the shards in `directory`.

    With an index.json, each shard must exist with the size that it records, and hold ids below
    `vocab_size` (default: the tokenizer's); `verify` also compares checksums, which reads every
    byte. Without one, every .npy file below the directory is a shard of NeoX ids, held out if its
    path matches the glob `heldout`, and `verify` reads them for the largest id.

    Raises InputError if a check fails, if `tokenizer_sha256` is given and is not that of the
    shards, or if there is no training token.
    """
    directory = Path(directory)
    indexed = (directory / INDEX).exists()
    index = _read_index(directory) if indexed else _bare_index(directory, heldout)
    tokenizer = index["tokenizer"]
    if tokenizer_sha256 not in (None, tokenizer["sha256"]):
        raise InputError(
            f"{directory}: the shards were made with tokenizer {tokenizer['name']} "
            f"({tokenizer['sha256'][:12]}), not the one asked for ({tokenizer_sha256[:12]})"
        )
    vocab_size = vocab_size or index["vocab_size"]
    dtype = f"<u{np.dtype(index['dtype']).itemsize}"
    shards = [(r, Shard(directory / r.file, dtype, r.tokens)) for r in index["shards"]]
    for record, shard in shards:
        _check_file(record, shard, vocab_size)
    if verify:
        _verify(directory, shards, vocab_size, checksums=indexed)

    def split(name: str) -> TokenSplit:
        chosen = tuple(shard for record, shard in shards if record.split == name)
        return TokenSplit(name, chosen, index["eos_id"], index["pad_id"])

    if not split("train").tokens:
        raise InputError(f"{directory}: the shards hold no training tokens")
    return TokenShards(
        directory=directory,
        train=split("train"),
        heldout=split("heldout"),
        vocab_size=index["vocab_size"],
        eos_id=index["eos_id"],
        pad_id=index["pad_id"],
        tokenizer=tokenizer["name"],
        tokenizer_sha256=tokenizer["sha256"],
        sha256=hashlib.sha256(json.dumps([asdict(r) for r, _ in shards]).encode()).hexdigest(),
    )


def write_index(
    directory: str | os.PathLike, tokenizer: Tokenizer, *, heldout: str = HELDOUT
) -> TokenShards:
    """Add an index.json to shards made elsewhere with `tokenizer`, and open them.

    Every .npy file below `directory` is a shard, held out if its path matches the glob `heldout`.
    No other file is touched. Raises InputError if there is an index already, no shard, a file that
    is not of this layout, or an id outside the vocabulary.
    """
    directory = Path(directory)
    if (directory / INDEX).exists():
        raise InputError(f"{directory / INDEX} exists; remove it to have it written anew")
    paths = _shard_paths(directory)
    dtype = token_dtype(tokenizer.vocab_size)
    records = []
    with reading("checksums", sum(path.stat().st_size for path in paths)) as advance:
        for path in paths:
            file = path.relative_to(directory).as_posix()
            shard = Shard(path, dtype.str, _tokens_in(path, dtype))
            sha256, max_id = _scan(shard, advance)
            if max_id >= tokenizer.vocab_size:
                raise _id_too_large(path, max_id, tokenizer.vocab_size)
            documents = sum(1 for _ in shard.spans(tokenizer.eos_id))
            split = _split_of(file, heldout)
            spans = spans_digest(path)
            records.append(ShardRecord(file, split, shard.tokens, documents, sha256, max_id, spans))
    save_index(directory, tokenizer, records)
    return open_shards(directory, verify=False)


def save_index(directory: Path, tokenizer: Tokenizer, records: Sequence[ShardRecord]) -> None:
    """Write index.json for shards that `records` describe, atomically."""
    index = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "pad_id": tokenizer.pad_id,
        "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256},
        "shards": [asdict(record) for record in records],
    }
    write_atomically(directory / INDEX, (json.dumps(index, indent=1) + "\n").encode())


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the little-endian type of ids on disk: uint16, or uint32 above 65536 ids."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def spans_path(shard: Path) -> Path:
    """Return the sidecar that lists the document spans of a shard."""
    return shard.with_suffix(".csv.gz")


def _read_index(directory: Path) -> dict:
    path = directory / INDEX
    try:
        index = json.loads(path.read_bytes())
        if (index["format"], index["version"]) != (FORMAT, VERSION):
            raise ValueError(f"format {index['format']} version {index['version']}")
        index["shards"] = [ShardRecord(**record) for record in index["shards"]]
        np.dtype(index["dtype"])
        for key in ("vocab_size", "eos_id", "pad_id"):
            index[key] = int(index[key])
        index["tokenizer"] = {key: index["tokenizer"][key] for key in ("name", "sha256")}
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} is not an index that this version reads: {error!r}") from error
    return index


def _bare_index(directory: Path, heldout: str) -> dict:
    """Return the index of shards that have none, taken to be uint16 ids of the NeoX tokenizer."""
    paths = _shard_paths(directory)
    tokenizer = load_tokenizer("neox")
    dtype = token_dtype(tokenizer.vocab_size)
    files = {path.relative_to(directory).as_posix(): _tokens_in(path, dtype) for path in paths}
    return {
        "dtype": dtype.name,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "pad_id": tokenizer.pad_id,
        "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256},
        "shards": [
            ShardRecord(file, _split_of(file, heldout), tokens, 0, "", 0)
            for file, tokens in files.items()
        ],
    }


def _shard_paths(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise InputError(f"data.dir = {directory} is not a directory")
    paths = sorted(directory.rglob("*.npy"))
    if not paths:
        raise InputError(
            f"data.dir = {directory} holds no token shards; make them with `depthjax data prepare`"
        )
    return paths


def _split_of(file: str, heldout: str) -> str:
    return "heldout" if fnmatchcase(file, heldout) else "train"


def _tokens_in(path: Path, dtype: np.dtype) -> int:
    """Return how many ids a shard file holds; InputError if it is not of this layout."""
    with open(path, "rb") as file:
        if file.read(len(_NPY_MAGIC)) == _NPY_MAGIC:
            raise InputError(
                f"{path} is a real NumPy file with a header; token shards are the bare ids, as "
                f"written by `numpy.load(path).astype('{dtype.str}').tofile(path)`"
            )
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise InputError(f"{path} has {size} bytes, not a whole number of {dtype.name} tokens")
    return size // dtype.itemsize


def _check_file(record: ShardRecord, shard: Shard, vocab_size: int) -> None:
    if not shard.path.is_file():
        raise InputError(f"{shard.path} is missing, though {INDEX} lists it")
    expected, size = record.tokens * np.dtype(shard.dtype).itemsize, shard.path.stat().st_size
    if size != expected:
        raise InputError(f"{shard.path} has {size} bytes where {INDEX} says {expected}")
    if record.max_id >= vocab_size:
        raise _id_too_large(shard.path, record.max_id, vocab_size)


def _verify(
    directory: Path,
    shards: list[tuple[ShardRecord, Shard]],
    vocab_size: int,
    checksums: bool,
) -> None:
    """Read every shard and compare its checksum, or without checksums its largest id."""
    total = sum(shard.path.stat().st_size for _, shard in shards)
    with reading(f"verifying {directory}", total) as advance:
        for record, shard in shards:
            sha256, max_id = _scan(shard, advance)
            if checksums and sha256 != record.sha256:
                raise InputError(
                    f"{shard.path} has another checksum than {INDEX} records; it is damaged or "
                    "was replaced"
                )
            if max_id >= vocab_size:
                raise _id_too_large(shard.path, max_id, vocab_size)
            if record.spans_sha256 not in (None, spans_digest(shard.path)):
                raise InputError(
                    f"{spans_path(shard.path)} is missing or has another checksum than {INDEX} "
                    "records; it is damaged or was replaced"
                )


def spans_digest(shard: Path) -> str | None:
    """Return the SHA-256 of a shard's sidecar, None where it has none."""
    sidecar = spans_path(shard)
    return hashlib.sha256(sidecar.read_bytes()).hexdigest() if sidecar.exists() else None


def _scan(shard: Shard, advance: Callable[[int], None]) -> tuple[str, int]:
    """Return a shard's SHA-256 and its largest id (-1 if empty)."""
    digest, max_id = hashlib.sha256(), -1
    with open(shard.path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            max_id = max(max_id, int(np.frombuffer(chunk, shard.dtype).max()))
            advance(len(chunk))
    return digest.hexdigest(), max_id


def _id_too_large(path: Path, token_id: int, vocab_size: int) -> InputError:
    return InputError(
        f"{path} holds token id {token_id}, outside a vocabulary of {vocab_size}; was another "
        "tokenizer used?"
    )
