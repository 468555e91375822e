"""A request to stop (SIGTERM, Ctrl-C) that is heard even while XLA compiles."""

import os
import signal
import sys
import threading
from collections.abc import Callable

import jax

from depthjax.errors import InputError
from depthjax.parallel import processes

STOP_STATUS = "DEPTHJAX_STOP_STATUS"


class Stopped(Exception):
    """Long work was left off because a stop was requested."""


def _stop_status() -> int:
    """What the environment wants of a process that stopped and saved; InputError where it is no
    exit status."""
    text = os.environ.get(STOP_STATUS) or "0"
    if not text.isdecimal() or int(text) > 255:
        raise InputError(f"{STOP_STATUS} is {text!r}: give an exit status, 0 to 255")
    return int(text)


class StopSignal:
    """Context manager: notes SIGTERM and SIGINT instead of dying of them.

    The training loop asks `requested` between steps, saves, and leaves with `exit_status`. Until
    the loop is `ready` there is nothing to save, and a signal ends the process at once: Python runs
    signal handlers only between bytecodes, and compilation is one very long one, so a thread
    listens on the wakeup descriptor. A second Ctrl-C interrupts as usual. Outside the main thread,
    where Python allows no signal handlers, nothing is changed and `requested` stays False.

    Several processes stop at the same step, whichever of them was signalled: behind each step they
    `vote` on the devices, and one step later `heed` the outcome. `requested` is what they heeded.
    """

    def __init__(self, say: Callable[[str], None]):
        self._stop_status = _stop_status()
        self._say = say
        self._signal = self._heeded = 0
        self._ready = threading.Event()

    @property
    def requested(self) -> bool:
        return bool(self._heeded if processes.several() else self._signal)

    def vote(self) -> jax.Array | int:
        """The signal that any process has had so far, 0 for none: on its way, not waited for."""
        return processes.largest(self._signal)

    def heed(self, vote: jax.Array | int) -> None:
        """Waits for a vote and, if it says so, requests the stop on all processes."""
        self._heeded = int(vote) or self._heeded

    def check(self) -> None:
        """Raises Stopped once a stop is requested; several processes agree on it, and wait."""
        self.heed(self.vote())
        if self.requested:
            raise Stopped

    @property
    def exit_status(self) -> int:
        """130 after Ctrl-C. After SIGTERM, when the work is safe, 0, or what the environment says
        in DEPTHJAX_STOP_STATUS: a scheduler that takes 0 for the end of training sets it."""
        if (self._heeded or self._signal) == signal.SIGINT:
            return 130
        return self._stop_status

    def ready(self) -> None:
        """From now on the loop looks at `requested` itself."""
        self._ready.set()

    def _note(self, number: int, frame: object) -> None:
        if self._signal and number == signal.SIGINT:
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
