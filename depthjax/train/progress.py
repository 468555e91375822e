"""The live line of a training run: a bar on a terminal, plain lines in a log file."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class ProgressLine:
    """Context manager; `steps` in all, of which `done` were taken before."""

    def __init__(self, console: Console, steps: int, done: int):
        self._console, self._steps, self._first = console, steps, done
        self._began = time.monotonic()
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(
            "training", total=steps, completed=done, text="compiling"
        )

    def update(self, step: int, text: str) -> None:
        """Moves the bar to `step`; `text` stands beside it, or on a line of its own in a log."""
        if self._console.is_terminal:
            self._progress.update(self._task, completed=step, text=text)
            return
        pace = (time.monotonic() - self._began) / max(step - self._first, 1)
        left = time.strftime("%H:%M:%S", time.gmtime(pace * (self._steps - step)))
        self._console.print(f"step {step}/{self._steps}  {text}  {left} left", soft_wrap=True)

    def __enter__(self) -> "ProgressLine":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
