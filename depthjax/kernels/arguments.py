"""Refusing arguments that do not go together, in one sentence and before anything is compiled."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Shape = tuple[int | str, ...]
"""Wanted sizes; a name stands for any."""


def check_array(name: str, array: Any, wanted: str, axes: int = 2, least: int = 1) -> None:
    """Raises ValueError where `array` is none of floating-point numbers with so many axes or more,
    at least so many rows and one feature; wanted: its axes, as "[N, ..., D]"."""
    dtype = getattr(array, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        given = type(array).__name__ if dtype is None else dtype
        raise ValueError(f"{name} is {given}: give an array {wanted} of floating-point numbers")
    rows = array.shape[0] if axes > 1 and array.ndim else least
    if array.ndim < axes or rows < least or not array.shape[-1]:
        some = f"{wanted[1]} and D" if axes > 1 and least else "D"
        raise ValueError(f"{name} has shape {array.shape}: give {wanted} with {some} at least 1")


def check_given(**arguments: Any) -> None:
    """Raises ValueError where one of them is None."""
    for name, argument in arguments.items():
        if argument is None:
            raise ValueError(f"{name} is None: give an array")


def check_shapes(like: str, array: jax.Array, **given: tuple[Any, Shape]) -> None:
    """Raises ValueError where one of the given (argument, its shape) has another shape than goes
    with `array`, whose name is `like`. Arguments that are None are not checked."""
    for name, (argument, shape) in given.items():
        if argument is None:
            continue
        wanted = f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
        if shape and not hasattr(argument, "dtype"):
            raise ValueError(f"{name} is {type(argument).__name__}: give an array {wanted}")
        actual = np.shape(argument)
        known = [(a, b) for a, b in zip(actual, shape, strict=False) if isinstance(b, int)]
        if len(actual) != len(shape) or any(a != b for a, b in known):
            need = "need" if like.endswith("s") else "needs"
            raise ValueError(
                f"{name} has shape {actual}, but {like} of shape {array.shape} {need} {wanted}"
            )


def check_number(name: str, number: Any, least: int, most: float, what: str) -> None:
    """Raises ValueError where `number` is no integer in least..most, as far as that is known before
    anything is computed; what: it says. None is not checked."""
    if number is None:
        return
    known = not isinstance(number, jax.Array)
    if np.shape(number) or not jnp.issubdtype(jnp.result_type(number), jnp.integer):
        given = number if known else jax.typeof(number)
        raise ValueError(f"{name} is {given}: give {what}, one integer")
    if known and not least <= number <= most:
        bounds = f"at least {least}" if math.isinf(most) else f"{least} to {most}"
        raise ValueError(f"{name} is {number}: give {what}, {bounds}")
