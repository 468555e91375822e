"""Where a run's numbers go: JSON lines always, TensorBoard on request."""

import json
import math
import pathlib
from typing import Any

from depthjax.data.files import write_atomically
from depthjax.errors import InputError


def read_jsonl(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records, each with a step, of a JSON-lines file; [] where it does not exist. A line that
    was half written, or damaged, is left out."""
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def json_numbers(value: Any) -> Any:
    """`value` with None for every NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: json_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [json_numbers(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Metrics:
    """`metrics.jsonl` of a run directory, one record a log line, each with its step.

    Records beyond `step`, where the run now continues, are dropped: they will be written again.
    """

    def __init__(self, directory: pathlib.Path, step: int, tensorboard: bool):
        self.path = directory / "metrics.jsonl"
        kept = [record for record in read_jsonl(self.path) if record["step"] <= step]
        write_atomically(self.path, "".join(json.dumps(r) + "\n" for r in kept).encode())
        self._file = self.path.open("a")
        self._board = None
        if tensorboard:
            writer = tensorboard_writer()
            self._board = writer(str(directory / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """values: numbers and lists of numbers (written as name/0, name/1, ... to TensorBoard)."""
        values = json_numbers(values)
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        if self._board is None:
            return
        for name, value in values.items():
            many = enumerate(value) if isinstance(value, list) else None
            for tag, number in [(f"{name}/{i}", v) for i, v in many] if many else [(name, value)]:
                if number is not None:
                    self._board.add_scalar(tag, number, step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


class NoMetrics:
    """In the place of Metrics where another process writes them."""

    def write(self, step: int, values: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


def tensorboard_writer():
    """The class that writes event files; InputError where its package is missing."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise InputError(
            'run.tensorboard is True, which needs tensorboardX: pip install "depthjax[tb]"'
        ) from error
    return SummaryWriter
