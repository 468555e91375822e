"""What the weights of streams are spelled with, so that XLA and kernels run the same function."""

import contextlib
import contextvars
from collections.abc import Callable
from typing import Any

import jax

_SPELLED_OUT = contextvars.ContextVar("spelled_out", default=False)


@contextlib.contextmanager
def spelled_out():
    """Makes `repeat` a straight line of steps: a kernel cannot differentiate a loop."""
    token = _SPELLED_OUT.set(True)
    try:
        yield
    finally:
        _SPELLED_OUT.reset(token)


def repeat(step: Callable[[Any], Any], state: Any, times: int) -> Any:
    """The state after `times` steps: one loop, whose steps the backward pass computes again."""
    if _SPELLED_OUT.get():
        for _ in range(times):
            state = step(state)
        return state
    again = jax.checkpoint(step)
    return jax.lax.scan(lambda state, _: (again(state), None), state, length=times)[0]


def beside(tree: Any, tokens: int) -> Any:
    """Small arrays with `tokens` axes of size 1 behind their own."""
    return jax.tree.map(lambda leaf: leaf.reshape(*leaf.shape, *[1] * tokens), tree)
