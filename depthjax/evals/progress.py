"""Progress of an evaluation on stderr: a bar on a terminal, now and then a line elsewhere."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

_LINE_SECONDS = 30.0  # between two lines


class Progress:
    """A context manager around work on `total` pieces; nothing is shown where `title` is None."""

    def __init__(self, title: str | None, total: int):
        console = Console(stderr=True, markup=False)
        self._title, self._total, self._done = title, total, 0
        self._began = self._last = time.monotonic()
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=title is None or not console.is_terminal,
        )
        self._task = self._bar.add_task(title or "", total=total)

    def advance(self, pieces: int) -> None:
        """Counts pieces that are done."""
        self._done += pieces
        self._bar.advance(self._task, pieces)
        now = time.monotonic()
        if self._title is None or not self._bar.disable or now - self._last < _LINE_SECONDS:
            return
        self._last = now
        left = (now - self._began) * (self._total / self._done - 1)
        text = f"{self._title}: {self._done:,} of {self._total:,}, about {left / 60:.0f} min left"
        self._bar.console.print(text, soft_wrap=True, highlight=False)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()
