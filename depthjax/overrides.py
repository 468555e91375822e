"""`--field value` on the command line, over a config: tyro does the parsing, this says what is
wrong in one sentence."""

import contextlib
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tyro

from depthjax.config import Config, flatten
from depthjax.errors import InputError, suggest

_DIALS = ("--model.shape", "--model.residual")


def override(
    load: Callable[[str | None, str | None], Config],
    arguments: Sequence[str],
    prog: str,
    options: Sequence[str] = (),
) -> Config:
    """The config of `load(shape, residual)` with the fields in `arguments` set.

    `--model.shape` and `--model.residual` go to `load`, so that a config can follow them; the rest
    override fields of what it returns. options: what else the command takes, already taken. Raises
    InputError naming an unknown field or a wrong value.
    """
    arguments = [_underscored(argument) for argument in arguments]
    rest, dials = take(arguments, _DIALS)
    default = load(dials["--model.shape"], dials["--model.residual"])
    return parse(
        lambda: tyro.cli(
            Config,
            prog=prog,
            description=(
                "Fields of the config; the defaults shown are those of the config at hand. "
                "--model.residual NAME picks a residual connection, and with it its own fields."
            ),
            default=default,
            args=_check_fields(rest, default, options),
            config=(tyro.conf.FlagConversionOff,),
            use_underscores=True,
        )
    )


def parse(run: Callable[[], Any]) -> Any:
    """Runs a tyro parser; its framed error message becomes one sentence."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return run()
    except SystemExit as stop:
        if not stop.code:
            raise
        lines = [line.strip("│ ") for line in errors.getvalue().splitlines()[1:]]
        text = " ".join(lines).split("───")[0].split("Got errors:")[0]
        raise InputError(" ".join(text.split()) or "the arguments cannot be read") from None


def _is_flag(argument: str) -> bool:
    return argument.startswith("--")


def _underscored(argument: str) -> str:
    """`--a.b-c=d-e` as `--a.b_c=d-e`."""
    if not _is_flag(argument):
        return argument
    name, equals, value = argument.removeprefix("--").partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


def take(arguments: Iterable[str], names: Sequence[str]) -> tuple[list[str], dict[str, str | None]]:
    """Splits off the last `NAME value` or `NAME=value` of each name."""
    found: dict[str, str | None] = dict.fromkeys(names)
    rest, queue = [], list(arguments)
    while queue:
        name, equals, value = queue.pop(0).partition("=")
        if name not in found:
            rest.append(name + equals + value)
            continue
        if not equals and (not queue or _is_flag(queue[0])):
            raise InputError(f"{name} needs a value")
        found[name] = value if equals else queue.pop(0)
    return rest, found


def _check_fields(arguments: Iterable[str], default: Config, options: Sequence[str]) -> list[str]:
    """The arguments, true, false and none spelt as Python does; InputError for unknown fields."""
    fields = {f"--{n}": v for n, v in flatten(default).items() if n != "model.residual.name"}
    checked, wants_value, text = [], False, False
    for argument in arguments:
        if _is_flag(argument):
            name, equals, value = argument.partition("=")
            if name not in (*fields, "--help"):
                known = [*fields, *_DIALS, *options]
                raise InputError(f"field {name} is unknown: {suggest(name, known)}")
            wants_value, text = not equals, isinstance(fields.get(name), str)
        elif wants_value or argument == "-h":
            name, equals, value, wants_value = "", "", argument, False
        else:
            raise InputError(f"argument {argument!r} follows no field: write --field value")
        if not text and value.lower() in ("true", "false", "none"):
            value = value.title()
        checked.append(name + equals + value)
    return checked
