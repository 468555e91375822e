"""`--field value` on the command line, over a config: tyro does the parsing, this says what is
wrong in one sentence."""

import contextlib
import dataclasses
import io
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tyro

from depthjax.config import Config, MeshConfig, flatten
from depthjax.errors import InputError, suggest

_DIALS = ("--model.shape", "--model.residual")
_MESH = "--mesh"


def override(
    load: Callable[[str | None, str | None], Config],
    arguments: Sequence[str],
    prog: str,
    options: Sequence[str] = (),
) -> Config:
    """The config of `load(shape, residual)` with the fields in `arguments` set.

    `--model.shape` and `--model.residual` go to `load`, so that a config can follow them; the rest
    override fields of what it returns. `--mesh data=2,fsdp=4` says all fields of the mesh, those
    that it does not name having their defaults; `--mesh auto` is `--mesh.auto true`. options: what
    else the command takes, already taken. Raises InputError naming an unknown field or a wrong
    value.
    """
    arguments = [_underscored(argument) for argument in arguments]
    rest, dials = take(arguments, (*_DIALS, _MESH))
    rest = [*_mesh_fields(dials[_MESH]), *rest]
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


def _mesh_fields(text: str | None) -> list[str]:
    """The fields that the value of `--mesh` is short for."""
    if text is None:
        return []
    if text == "auto":
        return ["--mesh.auto=True"]
    fields = {f.name: str(f.default) for f in dataclasses.fields(MeshConfig)}
    known = [name for name in fields if name != "auto"]
    given = set()
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in known or not re.fullmatch(r"-?\d+", size):
            raise InputError(
                f"mesh is {text!r}: write auto, or sizes such as data=2,fsdp=4 "
                f"of {', '.join(known)}"
            )
        if name in given:
            raise InputError(f"mesh is {text!r}, which says {name} twice: say it once")
        given.add(name)
        fields[name] = size
    return [f"--mesh.{name}={value}" for name, value in fields.items()]


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
                known = [*fields, *_DIALS, _MESH, *options]
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
