"""Progress of the diagnostics on a terminal, and now and then a line in a log."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 30.0


@contextlib.contextmanager
def show_progress(console: Console, name: str = "") -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function for the `progress` of `measure`; name: whose, shown in front."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
    bar = Progress(
        TextColumn("{task.description}"),
        *columns,
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    task, last, shown = bar.add_task(name), [time.monotonic()], [name]

    def progress(diagnostic: str, done: int, total: int) -> None:
        label = f"{name} {diagnostic}".strip()
        if console.is_terminal:
            if label != shown[0]:
                shown[0] = label
                bar.reset(task, description=label, total=total)
            bar.update(task, completed=done)
        elif done == total or time.monotonic() - last[0] > LINE_SECONDS:
            last[0] = time.monotonic()
            console.print(f"{label}: {done}/{total}", soft_wrap=True)

    with bar:
        yield progress
