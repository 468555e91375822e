"""A request to stop (SIGTERM, Ctrl-C) that is heard even while XLA compiles."""

import os
import signal
import sys
import threading
from collections.abc import Callable


class Stopped(Exception):
    """Long work was left off because a stop was requested."""


class StopSignal:
    """Context manager: notes SIGTERM and SIGINT instead of dying of them.

    The training loop asks `requested` between steps, saves, and leaves with `exit_status`. Until
    the loop is `ready` there is nothing to save, and a signal ends the process at once: Python runs
    signal handlers only between bytecodes, and compilation is one very long one, so a thread
    listens on the wakeup descriptor. A second Ctrl-C interrupts as usual. Outside the main thread,
    where Python allows no signal handlers, nothing is changed and `requested` stays False.
    """

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._signal: int | None = None
        self._ready = threading.Event()

    @property
    def requested(self) -> bool:
        return self._signal is not None

    def check(self) -> None:
        """Raises Stopped once a stop is requested."""
        if self.requested:
            raise Stopped

    @property
    def exit_status(self) -> int:
        """0 after SIGTERM (the scheduler asked, the work is safe), 130 after Ctrl-C."""
        return 130 if self._signal == signal.SIGINT else 0

    def ready(self) -> None:
        """From now on the loop looks at `requested` itself."""
        self._ready.set()

    def _note(self, number: int, frame: object) -> None:
        if self._signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number

    def _listen(self, descriptor: int) -> None:
        while data := os.read(descriptor, 1):
            number = data[0]
            if number in (signal.SIGTERM, signal.SIGINT) and not self._ready.is_set():
                self._signal = number
                self._say("stopped before the first step: nothing to save")
                sys.stdout.flush()
                os._exit(self.exit_status)

    def __enter__(self) -> "StopSignal":
        self._installed = threading.current_thread() is threading.main_thread()
        if not self._installed:
            return self
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._old = {n: signal.signal(n, self._note) for n in (signal.SIGTERM, signal.SIGINT)}
        self._old_wakeup = signal.set_wakeup_fd(self._write)
        threading.Thread(target=self._listen, args=(self._read,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._installed:
            return
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old.items():
            signal.signal(number, handler)
        os.close(self._write)  # ends the listener
