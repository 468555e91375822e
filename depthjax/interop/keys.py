"""Values in the configs of others, checked as they are read.

Each function takes the config and a key, and raises KeyError where the key is missing and has no
default, or InputError that says the key, its value and what would be right.
"""

import functools
import math
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from depthjax.errors import InputError

_NEEDED: Any = object()


def wrong(name: str, value: Any, right: str) -> InputError:
    """The error that `name` is `value`, and what would be right."""
    return InputError(f"{name} is {reprlib.repr(value)}: {right}")


def _value(values: Mapping[str, Any], name: str, default: Any) -> Any:
    return values[name] if default is _NEEDED else values.get(name, default)


def whole(values: Mapping[str, Any], name: str, default: Any = _NEEDED) -> int:
    """A positive integer."""
    value = _value(values, name, default)
    if type(value) is not int or not 1 <= value < 2**31:
        raise wrong(name, value, "give a positive integer below 2^31")
    return value


def number(
    values: Mapping[str, Any], name: str, default: Any = _NEEDED, *, zero: bool = False
) -> float:
    """A positive number, or (zero) 0 as well."""
    value = _value(values, name, default)
    right = "give a finite positive number" + (" or 0" if zero else "")
    if type(value) not in (int, float) or not 0 <= value < math.inf or not (value or zero):
        raise wrong(name, value, right)
    try:
        return float(value)
    except OverflowError as error:  # an integer beyond what a float can hold
        raise wrong(name, value, right) from error


epsilon = functools.partial(number, zero=True)


def flag(values: Mapping[str, Any], name: str, default: Any = _NEEDED) -> bool:
    """True or false."""
    value = _value(values, name, default)
    if type(value) is not bool:
        raise wrong(name, value, "give true or false")
    return value


def choice(values: Mapping[str, Any], name: str, choices: Iterable[str]) -> str:
    """One of a few words."""
    value, choices = values[name], list(choices)
    if value not in choices:
        raise wrong(name, value, f"choose from {', '.join(choices)}")
    return value


def section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object within the config, its keys written as "name.key"; empty where absent or null."""
    value = values.get(name)
    if not isinstance(value, Mapping | None):
        raise wrong(name, value, "give an object with keys, or null")
    return {f"{name}.{key}": entry for key, entry in (value or {}).items()}
