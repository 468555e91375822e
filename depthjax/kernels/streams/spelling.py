"""What the weights of streams are spelled with, so that XLA and kernels run the same function."""

import contextlib
import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Repeat = Callable[[Callable[[Any], Any], Any, int], Any]


def repeat(step: Callable[[Any], Any], state: Any, times: int) -> Any:
    """The state after `times` steps, as `repeating` says."""
    return _REPEAT.get()(step, state, times)


@contextlib.contextmanager
def repeating(run: Repeat):
    """Makes `repeat` run so."""
    token = _REPEAT.set(run)
    try:
        yield
    finally:
        _REPEAT.reset(token)


def in_a_loop(step: Callable[[Any], Any], state: Any, times: int) -> Any:
    """The default: one loop, whose steps the backward pass computes again."""
    again = jax.checkpoint(step)
    return jax.lax.scan(lambda state, _: (again(state), None), state, length=times)[0]


def spelled_out(step: Callable[[Any], Any], state: Any, times: int) -> Any:
    """A straight line of steps: a kernel cannot differentiate a loop."""
    for _ in range(times):
        state = step(state)
    return state


_REPEAT: contextvars.ContextVar[Repeat] = contextvars.ContextVar("repeat", default=in_a_loop)


def beside(tree: Any, tokens: int) -> Any:
    """Small arrays with `tokens` axes of size 1 behind their own."""
    return jax.tree.map(lambda leaf: leaf.reshape(*leaf.shape, *[1] * tokens), tree)


def pull_weights(
    pull: Callable, eps: float, width: int, read: jax.Array, dots: Sequence, by_write: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], Any, Sequence[Any]]:
    """((r, k), cotangents of the gates, and of products and mean squares) by `pull`, which takes
    the cotangents of (read, write, transport).

    dots: (u . H_j [m, ...], z . H_j [m, ...], G_t . H_j [m, m, ...]), in the names of
    `streams.mosaic_tpu`, which also says what r and k are.
    """
    by_u, by_z, by_transport = dots
    r = jax.lax.rsqrt(jnp.sum(read * by_z, axis=0) / width + eps)
    k = r * r * r * (jnp.sum(read * by_u, axis=0) / width)
    by_gates, *by_measured = pull((r * by_u - k * by_z, by_write, by_transport))
    return (r, k), by_gates, by_measured
