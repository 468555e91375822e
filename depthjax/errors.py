"""What ends a command in one sentence: above all wrong input, and what would be right."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Bad input. The message is one sentence: field or file, its value, and the remedy.

    The command line prints it without a traceback and exits with status 2.
    """


class JobBroken(RuntimeError):
    """One of several processes failed, or is gone. The message is one sentence.

    The command line prints it without a traceback and exits with status 1.
    """


def suggest(name: str, known: Iterable[str]) -> str:
    """What would be right in place of `name`: the nearest of the known names, else all of few."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"did you mean {near[0]}?"
    return (
        f"known are {', '.join(names) or 'none'}" if len(names) <= 12 else "no known name is alike"
    )
