"""What the stages of a pipeline send one another between two ticks.

Bytes are counted between pairs of stages: a collective permute lists the pairs that have something
to send, and each of them moves its operand once. A stage that no pair names as a target gets zeros.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from depthjax.kernels.over_mesh import STAGE
from depthjax.parallel.schedule import Pairs, Rows, Schedule, Strip


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The hand-offs of a schedule, each in the form of one tick, a plain number.

    All stages run the same program; what differs between them is looked up by the stage's number.
    """

    schedule: Schedule
    rows: Rows

    @property
    def last(self) -> int:
        return self.schedule.stages - 1

    def table(self, of: Callable[[int, int], Any]) -> np.ndarray:
        """[ticks, P]: of(microbatch, chunk) of each stage; 0 or False where it waits."""
        items = [self._items(tick) for tick in range(self.schedule.ticks)]
        kind = bool if isinstance(of(0, 0), bool) else np.int32
        return np.array([[of(*item) if item else 0 for item in row] for row in items], kind)

    def send(self, tick: int, carry: Any, history: Any, following: Any) -> tuple[Any, Any]:
        """(carry, history) that each stage has in front of its next chunk. carry, history: behind
        the chunk of this tick; following: the history that a stage has of its next microbatch."""
        with jax.named_scope("hand_off_carry"):
            carry = _permute(carry, self.schedule.pairs(tick))
        source, target = self._held_by_next(tick), self._held(tick + 1)
        for strip in self.rows.strips(tick):
            with jax.named_scope("hand_off_rows"):
                rows = _permute(_take(history, source, strip), strip.pairs)
            targets = {target for _, target in strip.pairs}
            mine = _here(stage in targets for stage in range(self.schedule.stages))
            old = _take(following, target, strip)
            rows = jax.tree.map(lambda a, b: jnp.where(mine, a, b), rows, old)  # noqa: B023
            following = _put(following, rows, target, strip)
        return carry, following

    def send_back(self, tick: int, d_carry: Any, d_history: Any, d_before: Any) -> tuple[Any, Any]:
        """The transpose of `send`: (cotangent of the carry behind the chunk of this tick, d_before
        with what its rows get). d_carry, d_history: in front of the chunk of the next tick;
        d_before: what a stage has of the cotangent for its microbatch of this tick."""
        with jax.named_scope("hand_off_carry"):
            d_carry = _permute(d_carry, _turned(self.schedule.pairs(tick)))
        source, target = self._held(tick + 1), self._held_by_next(tick)
        for strip in self.rows.strips(tick):
            with jax.named_scope("hand_off_rows"):
                rows = _permute(_take(d_history, source, strip), _turned(strip.pairs))
            rows = jax.tree.map(jnp.add, _take(d_before, target, strip), rows)
            d_before = _put(d_before, rows, target, strip)
        return d_carry, d_before

    def to_first(self, share: jax.Array, microbatch: int) -> jax.Array:
        """From the stage that holds the share with a microbatch to the first, which begins it."""
        return _move(share, microbatch % self.schedule.stages, 0)

    def from_first(self, x: jax.Array, microbatch: int) -> jax.Array:
        return _move(x, 0, microbatch % self.schedule.stages)

    def to_last(self, share: jax.Array, microbatch: int) -> jax.Array:
        """From the stage that holds the share with a microbatch to the last, which finishes it."""
        return _move(share, microbatch % self.schedule.stages, self.last)

    def from_last(self, x: jax.Array, microbatch: int) -> jax.Array:
        return _move(x, self.last, microbatch % self.schedule.stages)

    def _items(self, tick: int) -> list[tuple[int, int] | None]:
        return [self.schedule.item(tick, stage) for stage in range(self.schedule.stages)]

    def _held(self, tick: int) -> jax.Array:
        """Rows that a stage holds already when it gets to its chunk of this tick."""
        return _here(self.rows.held(item[1]) if item else 0 for item in self._items(tick))

    def _held_by_next(self, tick: int) -> jax.Array:
        """Rows that the receiver of a stage's hand-off holds already."""
        held = {stage: self.rows.held(chunk) for stage, chunk in self.schedule.senders(tick)}
        return _here(held.get(stage, 0) for stage in range(self.schedule.stages))


def _here(values: Any) -> jax.Array:
    """The entry of this stage."""
    return jnp.asarray(np.array(list(values)))[jax.lax.axis_index(STAGE)]


def _take(history: Any, held: jax.Array, strip: Strip) -> Any:
    start, size = held + strip.start, strip.stop - strip.start
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), history)


def _put(history: Any, rows: Any, held: jax.Array, strip: Strip) -> Any:
    put = jax.lax.dynamic_update_slice_in_dim
    return jax.tree.map(lambda x, new: put(x, new, held + strip.start, 0), history, rows)


def _turned(pairs: Pairs) -> Pairs:
    return tuple((target, source) for source, target in pairs)


def _permute(tree: Any, pairs: Pairs) -> Any:
    if not pairs:
        return jax.tree.map(jnp.zeros_like, tree)
    return jax.tree.map(lambda x: jax.lax.ppermute(x, STAGE, pairs), tree)


def _move(x: jax.Array, source: int, target: int) -> jax.Array:
    """x of one stage on another, zeros on all the rest."""
    if source == target:
        return jnp.where(jax.lax.axis_index(STAGE) == target, x, 0)
    with jax.named_scope("hand_off_ends"):
        return jax.lax.ppermute(x, STAGE, [(source, target)])
