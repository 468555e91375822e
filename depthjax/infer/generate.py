"""Text continued token by token."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from depthjax.errors import InputError
from depthjax.infer.steps import decode_step, in_activation_dtype, prefill
from depthjax.layers import Cache
from depthjax.models import Transformer

_BLOCK = 128
"""Prompts and caches are rounded up to so many tokens, so that few programs are compiled, and
attention kernels apply."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn: from softmax(logits / temperature), restricted to the `top_k` largest
    logits, and then to the fewest tokens whose probabilities sum up to `top_p`.

    temperature 0 takes the largest logit. Raises InputError for what cannot be right.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature is {self.temperature}: give 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k is {self.top_k}: give at least 1 token")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}: give a probability, above 0 to 1")


def sample(logits: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """int32 [B]: a token for each row of logits [B, V]."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        p = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(p, axis=-1) - p
        least = jnp.min(jnp.where(before < sampling.top_p, ordered, jnp.inf), -1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


def stream(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    steps: int,
    sampling: Sampling = Sampling(),
    seed: int = 0,
) -> Iterator[np.ndarray]:
    """Yields `steps` times the next token of each prompt, int32 [B], as soon as it is there.

    prompts: token ids, of any lengths from 1 on. The same seed gives the same tokens.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise InputError("a prompt is empty: give at least one token")
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    width = _whole_blocks(lengths.max())
    ids = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    model, key = in_activation_dtype(model), jax.random.key(seed)
    size = width + _whole_blocks(steps)
    ids, cache = _first(model, ids, lengths, key, size=size, sampling=sampling)
    for step in range(1, steps + 1):
        yield np.asarray(ids)
        if step < steps:
            ids, cache = _next(model, ids, cache, key, step, sampling=sampling)


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    steps: int,
    sampling: Sampling = Sampling(),
    *,
    seed: int = 0,
    stop: int | None = None,
) -> list[np.ndarray]:
    """The tokens that follow each prompt: at most `steps`, and none from the first `stop` on.

    See `stream`, which yields them one by one.
    """
    found: list[np.ndarray] = []
    open_rows = np.ones(len(prompts), bool)
    for ids in stream(model, prompts, steps, sampling, seed):
        found.append(ids)
        open_rows &= ids != stop
        if not open_rows.any():
            break
    rows = np.stack(found, axis=1) if found else np.zeros((len(prompts), 0), np.int32)
    ends = [np.flatnonzero(row == stop) for row in rows]
    return [row[: end[0]] if len(end) else row for row, end in zip(rows, ends, strict=True)]


def _whole_blocks(tokens: int) -> int:
    return int(-(-tokens // _BLOCK) * _BLOCK)


@functools.partial(jax.jit, static_argnames=("size", "sampling"))
def _first(model, ids, lengths, key, *, size, sampling) -> tuple[jax.Array, Cache]:
    logits, cache = prefill(model, ids, size, lengths=lengths)
    return sample(logits, jax.random.fold_in(key, 0), sampling), cache


@functools.partial(jax.jit, static_argnames="sampling", donate_argnames="cache")
def _next(model, ids, cache, key, step, *, sampling) -> tuple[jax.Array, Cache]:
    logits, cache = decode_step(model, ids, cache)
    return sample(logits, jax.random.fold_in(key, step), sampling), cache
