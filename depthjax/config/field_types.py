"""Whether the values of a dataclass are of the types that its fields declare."""

import dataclasses
import math
import typing
from typing import Any, Literal

from depthjax.errors import InputError


def check_types(config: Any, prefix: str = "") -> None:
    """Raises InputError at the first field whose value is not of its declared type, not finite, or
    an integer beyond 31 bits."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        name, value, hint = f"{prefix}{field.name}", getattr(config, field.name), hints[field.name]
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, hint):
                raise InputError(f"{name} is {value!r}: give a {hint.__name__}")
            check_types(value, f"{name}.")
        elif not _is_of(value, hint):
            raise InputError(f"{name} is {value!r}: give {_wanted(hint)}")


def _wanted(hint: Any) -> str:
    """The type of a field, in words."""
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(typing.get_args(hint))
    text = getattr(hint, "__name__", str(hint)) if not typing.get_args(hint) else str(hint)
    numeric = {int, float} & {hint, *typing.get_args(hint)}
    return f"{text}, finite and below 2^31 in size" if numeric else text


def _is_of(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    if typing.get_args(hint):  # a union such as int | None
        return any(_is_of(value, option) for option in typing.get_args(hint))
    if hint is float:
        number = isinstance(value, float | int) and not isinstance(value, bool)
        return number and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31
    return isinstance(value, hint)
