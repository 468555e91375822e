"""Turning text into token shards, in a run that can be killed at any moment and started again.

Documents go to the open train or held-out shard of the current group. Once its train shard is full
the group is closed: both files are renamed into place, then manifest.jsonl gains a line with their
records and the position of the next document. A rerun drops what the manifest does not list and
continues from that position, so it ends with the same bytes as an uninterrupted run. index.json is
written last and marks the directory complete.
"""

import array
import gzip
import hashlib
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path

import numpy as np

from depthjax.data.corpus import EMBEDDED_CORPUS, Source, find_sources, read_documents
from depthjax.data.files import PARTIAL, cache_dir, partial_path, publish, write_atomically
from depthjax.data.progress import TokenProgress
from depthjax.data.shards import (
    HELDOUT,
    INDEX,
    ShardRecord,
    save_index,
    spans_digest,
    spans_path,
    token_dtype,
)
from depthjax.data.tokenizer import Tokenizer, load_tokenizer
from depthjax.errors import InputError

MANIFEST = "manifest.jsonl"
FINEWEB_EDU = "hf://datasets/HuggingFaceFW/fineweb-edu/sample/"
SPLITS = ("train", "heldout")
_BATCH_CHARACTERS = 1 << 22


@dataclass(frozen=True)
class PrepareSummary:
    """What a prepared directory holds; `reused` if it was complete before this run."""

    directory: Path
    documents: int
    train_tokens: int
    heldout_tokens: int
    shards: int
    seconds: float
    reused: bool


@dataclass(frozen=True)
class Position:
    """The next document: its source, the documents of it to skip, and its number in the corpus."""

    source: int = 0
    skip: int = 0
    document: int = 0


@dataclass(frozen=True)
class Group:
    """One line of the manifest: the shards closed together, and where the next group starts."""

    shards: tuple[ShardRecord, ...]
    next: Position


def prepare(
    inputs: str | os.PathLike | Iterable[str | os.PathLike],
    out: str | os.PathLike,
    *,
    tokenizer: str | os.PathLike = "neox",
    heldout_every: int = 10,
    heldout_files: str | None = None,
    shard_tokens: int = 100_000_000,
    text_key: str = "text",
    progress: bool = True,
) -> PrepareSummary:
    """Tokenize the documents that `inputs` name (see `find_sources`) into token shards in `out`.

    Held out are all documents of the source files whose name matches the glob `heldout_files`, or
    without it documents 0, n, 2n, ... of the corpus, n being `heldout_every`. For the FineWeb-Edu
    sample on the hub the default glob is that of DepthBench's validation file, if among the inputs.
    A group of shards is closed after the document that brings its train shard to `shard_tokens`.

    An interrupted run is continued, a complete one left alone. Raises InputError for bad inputs
    and options, a corpus of fewer than two documents, a split without documents, and an `out` that
    holds other files or the work of a run with other inputs or options.
    """
    start = time.monotonic()
    if heldout_every < 2:
        raise InputError(f"heldout_every = {heldout_every} must be at least 2")
    if shard_tokens < 1:
        raise InputError(f"shard_tokens = {shard_tokens} must be at least 1")
    tok = load_tokenizer(tokenizer)
    out = Path(out)
    made = f"{out.absolute()}{os.sep}"  # an `out` within an input is no input
    sources = [source for source in find_sources(inputs) if not source.path.startswith(made)]
    if not sources:
        raise InputError(f"every input lies within the output directory {out}; name other inputs")
    heldout_files = _heldout_glob(sources, heldout_files)
    plan = {
        "format": "depthjax-prepare",
        "version": 1,
        "tokenizer": {"name": tok.name, "sha256": tok.sha256},
        "heldout_every": None if heldout_files else heldout_every,
        "heldout_files": heldout_files,
        "shard_tokens": shard_tokens,
        "text_key": text_key,
        "sources": [[source.path, source.size] for source in sources],
    }
    groups = _resume(out, plan)
    reused = (out / INDEX).exists()
    if reused and progress:
        print(f"{out} is complete already; nothing to do", file=sys.stderr)
    if not reused:
        groups = _write_groups(out, plan, groups, sources, tok, progress)
        records = [record for split in SPLITS for record in _records(groups, split)]
        write_atomically(out / "tokenizer.json", tok.canonical_json().encode())
        save_index(out, tok, records)
    tokens = {split: sum(r.tokens for r in _records(groups, split)) for split in SPLITS}
    return PrepareSummary(
        directory=out,
        documents=groups[-1].next.document,
        train_tokens=tokens["train"],
        heldout_tokens=tokens["heldout"],
        shards=sum(len(group.shards) for group in groups),
        seconds=time.monotonic() - start,
        reused=reused,
    )


def default_corpus(tokenizer: str | os.PathLike = "neox") -> Path:
    """Return the embedded corpus as token shards, prepared in the cache at first use.

    Processes that do so at once each prepare a copy; the first to finish is kept.
    """
    tok = load_tokenizer(tokenizer)
    directory = cache_dir() / f"sotu-{Path(tok.name).stem}-{tok.sha256[:12]}"
    if not (directory / INDEX).exists():
        copy = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}{PARTIAL}")
        with resources.as_file(resources.files("depthjax") / "assets" / EMBEDDED_CORPUS) as corpus:
            prepare(corpus, copy, tokenizer=tokenizer, progress=False)
        try:
            os.rename(copy, directory)
        except OSError:  # another process was faster
            shutil.rmtree(copy)
    return directory


def _heldout_glob(sources: Sequence[Source], given: str | None) -> str | None:
    """Return the glob of held-out source names, or None to hold out every n-th document."""
    matches = [source for source in sources if fnmatchcase(source.name, given or HELDOUT)]
    if not given:
        fineweb = all(source.path.startswith(FINEWEB_EDU) for source in sources)
        return HELDOUT if fineweb and 0 < len(matches) < len(sources) else None
    if not matches or len(matches) == len(sources):
        some = "no" if not matches else "every"
        raise InputError(f"heldout_files = {given!r} matches {some} input file; it must match some")
    return given


def _records(groups: Sequence[Group], split: str) -> list[ShardRecord]:
    return [record for group in groups for record in group.shards if record.split == split]


# The manifest: a line with the plan, then a line for each closed group.


def _resume(out: Path, plan: dict) -> list[Group]:
    """Return the groups that an earlier run of `plan` closed in `out`; remove its other shards."""
    manifest = out / MANIFEST
    if not manifest.exists():
        if out.exists() and not (out.is_dir() and _only_partial(out)):
            raise InputError(f"{out} holds files that are not a preparation's; give another `out`")
        out.mkdir(parents=True, exist_ok=True)
        _write_manifest(out, plan, [])
    found, groups = _read_manifest(manifest)
    if found != plan:
        if groups:
            key = next(key for key in plan if found.get(key) != plan[key])
            raise InputError(
                f"{out} was begun with {_difference(key, found.get(key), plan[key])}; use the same "
                "inputs and options, or another `out`"
            )
        _write_manifest(out, plan, [])  # nothing was finished, so nothing is lost
    kept = {record.file for group in groups for record in group.shards}
    for file in kept:
        if not (out / file).is_file():
            raise InputError(f"{out / file} is missing, though {MANIFEST} lists it; remove {out}")
    _remove_unlisted(out, kept)
    return groups


def _only_partial(out: Path) -> bool:
    return all(path.name.endswith(PARTIAL) for path in out.iterdir())


def _difference(key: str, found, wanted) -> str:
    if key != "sources" or found is None:
        return f"{key} = {found!r}, not {wanted!r}"
    first = next((old for old in found if old not in wanted), None)
    if first is None:
        return f"{len(found)} input files, not {len(wanted)} or in another order"
    return f"other inputs, among them {first[0]} of {first[1]} bytes"


def _remove_unlisted(out: Path, kept: set[str]) -> None:
    for path in out.glob(f".*{PARTIAL}"):
        path.unlink()
    for split in SPLITS:
        for shard in out.glob(f"{split}-*.npy"):
            if shard.name not in kept:
                shard.unlink()
        for spans in out.glob(f"{split}-*.csv.gz"):
            if spans.name.replace(".csv.gz", ".npy") not in kept:
                spans.unlink()


def _read_manifest(path: Path) -> tuple[dict, list[Group]]:
    try:
        plan, *lines = (json.loads(line) for line in path.read_bytes().splitlines())
        groups = [
            Group(tuple(ShardRecord(**r) for r in line["shards"]), Position(**line["next"]))
            for line in lines
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} is damaged: {error!r}; remove {path.parent}") from error
    return plan, groups


def _write_manifest(out: Path, plan: dict, groups: Sequence[Group]) -> None:
    lines = [json.dumps(plan), *(json.dumps(asdict(group)) for group in groups)]
    write_atomically(out / MANIFEST, ("\n".join(lines) + "\n").encode())


# The stream of documents, and the shards it is written to.


def _write_groups(
    out: Path,
    plan: dict,
    groups: list[Group],
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    progress: bool,
) -> list[Group]:
    """Write the groups that follow `groups`; return all."""
    groups = list(groups)
    position = groups[-1].next if groups else Position()
    texts = _texts(sources, position, plan["text_key"])
    dtype = token_dtype(tokenizer.vocab_size)
    shown = TokenProgress(len(sources), position.source, progress)
    with shown, closing(_OpenGroup(out, len(groups), dtype)) as shards:
        for position, ids in _encoded(texts, tokenizer):
            source, number = sources[position.source], position.document - 1
            shards.add(_split_of(source, number, plan), ids)
            shown.advance(tokens=len(ids), done=position.source)
            if shards.tokens("train") >= plan["shard_tokens"]:
                groups.append(Group(shards.publish(), position))
                _write_manifest(out, plan, groups)
        _check_corpus(position.document, groups, shards, sources)
        if any(shards.tokens(split) for split in SPLITS):
            end = Position(len(sources), 0, position.document)
            groups.append(Group(shards.publish(), end))
            _write_manifest(out, plan, groups)
    return groups


def _split_of(source: Source, number: int, plan: dict) -> str:
    if plan["heldout_files"]:
        heldout = fnmatchcase(source.name, plan["heldout_files"])
    else:
        heldout = number % plan["heldout_every"] == 0
    return "heldout" if heldout else "train"


def _check_corpus(documents: int, groups, shards: "_OpenGroup", sources) -> None:
    if documents < 2:
        raise InputError(
            f"{documents} documents were found in {len(sources)} files, {sources[0].path} first, "
            "where at least two documents are needed, one to train on and one to hold out"
        )
    for split in SPLITS:
        if not shards.tokens(split) and not _records(groups, split):
            raise InputError(f"the {split} files, chosen by heldout_files, hold no documents")


def _texts(
    sources: Sequence[Source], position: Position, text_key: str
) -> Iterator[tuple[Position, str]]:
    """Yield each document from `position` on, with the position after it."""
    skip, document = position.skip, position.document
    for number in range(position.source, len(sources)):
        for text in read_documents(sources[number], skip, text_key):
            skip, document = skip + 1, document + 1
            yield Position(number, skip, document), text
        skip = 0


def _encoded(
    texts: Iterator[tuple[Position, str]], tokenizer: Tokenizer
) -> Iterator[tuple[Position, np.ndarray]]:
    """Replace each text by its ids; batches of some million characters keep all cores busy."""
    for batch in _batches(texts):
        positions, strings = zip(*batch, strict=True)
        yield from zip(positions, tokenizer.encode_documents(strings), strict=True)


def _batches(texts: Iterator[tuple[Position, str]]) -> Iterator[list[tuple[Position, str]]]:
    batch, characters = [], 0
    for position, text in texts:
        batch.append((position, text))
        characters += len(text) + 1
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _OpenGroup:
    """The train and held-out shards being written; closing it discards what is not published."""

    def __init__(self, directory: Path, number: int, dtype: np.dtype):
        self.directory, self.number, self.dtype = directory, number, dtype
        self.open: dict[str, _OpenShard] = {}

    def tokens(self, split: str) -> int:
        """Return the tokens in the open shard of `split`."""
        return self.open[split].tokens if split in self.open else 0

    def add(self, split: str, ids: np.ndarray) -> None:
        """Append a document to the open shard of `split`."""
        if split not in self.open:
            path = self.directory / f"{split}-{self.number:05d}.npy"
            self.open[split] = _OpenShard(path, split, self.dtype)
        self.open[split].add(ids)

    def publish(self) -> tuple[ShardRecord, ...]:
        """Give the open shards their names; return their records and start the next group."""
        records = tuple(self.open[split].publish() for split in SPLITS if split in self.open)
        self.open, self.number = {}, self.number + 1
        return records

    def close(self) -> None:
        for shard in self.open.values():
            shard.discard()


class _OpenShard:
    """One shard being written under a partial name."""

    def __init__(self, path: Path, split: str, dtype: np.dtype):
        self.path, self.split, self.dtype = path, split, dtype
        self.partial = partial_path(path)
        self.file = open(self.partial, "wb", buffering=1 << 20)  # noqa: SIM115
        self.digest = hashlib.sha256()
        self.ends = array.array("q")
        self.max_id = -1

    @property
    def tokens(self) -> int:
        return self.ends[-1] if self.ends else 0

    def add(self, ids: np.ndarray) -> None:
        data = ids.astype(self.dtype).tobytes()
        self.file.write(data)
        self.digest.update(data)
        self.max_id = max(self.max_id, int(ids.max()))
        self.ends.append(self.tokens + len(ids))

    def publish(self) -> ShardRecord:
        spans = partial_path(spans_path(self.path))
        with open(spans, "wb") as file:
            with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as lines:
                start = 0
                for end in self.ends:
                    lines.write(b"%d,%d\n" % (start, end))
                    start = end
            file.flush()
            os.fsync(file.fileno())
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        publish(spans, spans_path(self.path))
        publish(self.partial, self.path)
        return ShardRecord(
            file=self.path.name,
            split=self.split,
            tokens=self.tokens,
            documents=len(self.ends),
            sha256=self.digest.hexdigest(),
            max_id=self.max_id,
            spans_sha256=spans_digest(self.path),
        )

    def discard(self) -> None:
        self.file.close()
        self.partial.unlink(missing_ok=True)
