"""Progress on stderr: a bar on a terminal, now and then a plain line elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WORTH_A_BAR = 10**9  # bytes; less than this is read in seconds
BAR_SECONDS, LINE_SECONDS = 0.1, 30.0  # between two updates


@contextmanager
def reading(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the bytes just read; shows a bar if `total` is over 1 GB."""
    if total < WORTH_A_BAR:
        yield lambda size: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=total)
        yield lambda size: bar.advance(task, size)


class TokenProgress:
    """Documents, tokens, tokens a second, sources done and the time left that these suggest.

    A context manager around the work on `sources` files, of which `done` are behind already;
    nothing is shown if `shown` is false.
    """

    def __init__(self, sources: int, done: int, shown: bool):
        self.sources, self.first, self.done, self.shown = sources, done, done, shown
        self.documents = self.tokens = 0
        self.start = self.last = time.monotonic()
        self.bar = self._bar() if shown and sys.stderr.isatty() else None

    def _bar(self):
        from rich import progress
        from rich.console import Console

        bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("sources, left"),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.task = bar.add_task("", total=self.sources, completed=self.done)
        return bar

    def __enter__(self) -> "TokenProgress":
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, error, *_) -> None:
        if not error:
            self.done = self.sources
        if self.shown:
            self._show(time.monotonic())
        if self.bar:
            self.bar.stop()

    def advance(self, tokens: int, done: int) -> None:
        """Count a document of `tokens` tokens; `done` sources are now behind."""
        self.documents += 1
        self.tokens += tokens
        self.done = done
        now = time.monotonic()
        if self.shown and now - self.last > (BAR_SECONDS if self.bar else LINE_SECONDS):
            self._show(now)

    def _show(self, now: float) -> None:
        self.last = now
        elapsed = max(now - self.start, 1e-9)
        counts = (
            f"{self.documents:,} documents, {self.tokens:,} tokens, "
            f"{self.tokens / elapsed:,.0f} tokens/s"
        )
        if self.bar:
            self.bar.update(self.task, completed=self.done, description=counts)
            return
        line = f"{counts}, {self.done}/{self.sources} sources"
        if self.first < self.done < self.sources:
            left = elapsed * (self.sources - self.done) / (self.done - self.first)
            line += f", about {left / 60:,.0f} min left"
        print(line, file=sys.stderr, flush=True)
