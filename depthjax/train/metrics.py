"""Where a run's numbers go: JSON lines always, TensorBoard on request."""

import json
import pathlib
from typing import Any

from depthjax.errors import InputError


def read_jsonl(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file; [] where it does not exist; a half-written last line is
    left out."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


class Metrics:
    """`metrics.jsonl` of a run directory, one record a log line, each with its step.

    Records beyond `step`, where the run now continues, are dropped: they will be written again.
    """

    def __init__(self, directory: pathlib.Path, step: int, tensorboard: bool):
        self.path = directory / "metrics.jsonl"
        kept = [record for record in read_jsonl(self.path) if record["step"] <= step]
        rewritten = self.path.with_suffix(".jsonl.partial")
        rewritten.write_text("".join(json.dumps(record) + "\n" for record in kept))
        rewritten.replace(self.path)
        self._file = self.path.open("a")
        self._board = _tensorboard(directory, step) if tensorboard else None

    def write(self, step: int, values: dict[str, Any]) -> None:
        """values: numbers and lists of numbers (written as name/0, name/1, ... to TensorBoard)."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        if self._board is None:
            return
        for name, value in values.items():
            many = enumerate(value) if isinstance(value, list) else None
            for tag, number in [(f"{name}/{i}", v) for i, v in many] if many else [(name, value)]:
                self._board.add_scalar(tag, number, step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _tensorboard(directory: pathlib.Path, step: int):
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise InputError(
            'run.tensorboard is True, which needs tensorboardX: pip install "depthjax[tb]"'
        ) from error
    return SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1)
