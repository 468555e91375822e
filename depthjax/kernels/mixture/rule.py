"""The ablations of the mixture of depth sources that change no shape."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

Scores = Literal["softmax", "sigmoid"]
Keys = Literal["normalized", "raw"]


class MixtureRule(NamedTuple):
    """How sources are weighted (Attention Residuals, arXiv 2603.15031, the ablations).

    scores: a softmax over the sources, or a sigmoid of each logit, which sums to anything; keys: a
    logit is u . v rho, of the RMS-normalised source, or u . v; window: how many of the last sources
    are seen, beside the first (None: all).
    """

    scores: Scores = "softmax"
    keys: Keys = "normalized"
    window: int | None = None

    def check(self) -> None:
        """Raises ValueError for what there is not."""
        for name, known in {"scores": Scores, "keys": Keys}.items():
            given = getattr(self, name)
            if given not in known.__args__:
                raise ValueError(f"{name} is {given!r}: give one of {known.__args__}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}: give the last sources seen, at least 1")

    def skipped(self, count: jax.Array | int, newest: bool) -> jax.Array | int:
        """How many of `count` live rows, those right after the first, are not seen; newest: whether
        there is one more source, which is always seen."""
        if self.window is None:
            return 0
        outside = count + newest - self.window - 1
        return max(outside, 0) if isinstance(count, int) else jnp.maximum(outside, 0)

    def most(self, rows: int, newest: bool) -> int:
        """The most of so many rows that can be seen."""
        return rows - self.skipped(rows, newest)

    def seen(self, rows: int, count: jax.Array | int, newest: bool) -> jax.Array:
        """[rows]: true for those that are live and seen."""
        row = jnp.arange(rows)
        live = row < count
        if self.window is None:
            return live
        return live & ((row == 0) | (row > self.skipped(count, newest)))


PLAIN = MixtureRule()
"""The mixture of Attention Residuals itself."""
