"""Who computes what, and who sends what to whom, in an interleaved pipeline.

A network is cut into C = P V chunks of consecutive layers; chunk c runs on stage c mod P, as its
pass c // P. The stages take the microbatches P at a time through all passes, so that what one
finishes in a tick the next takes up in the next tick (interleaved schedule, Narayanan et al. 2021):
in tick t, stage r computes its item t - r, counted over groups of P microbatches, passes, and the
microbatches of a group, in this order.

A hand-off to chunk c brings the carry, and those rows of the history that are written in front of
chunk c and that its stage does not hold from its pass before (arXiv 2603.15031, cross-stage
caching).
"""

import dataclasses
import itertools
from typing import Literal, NamedTuple

Keeps = Literal["nothing", "received", "all"]
"""Rows that a stage still holds at its next pass: none; those it was sent, as the paper counts; or
those that it wrote itself as well."""

Pairs = tuple[tuple[int, int], ...]
"""(from, to) of stages."""


class Strip(NamedTuple):
    """Rows `start` to `stop` of those that a receiver lacks, and the pairs whose receivers lack so
    many."""

    start: int
    stop: int
    pairs: Pairs


@dataclasses.dataclass(frozen=True)
class Schedule:
    """P stages, V passes (virtual stages) of each, M microbatches, a multiple of P.

    Raises ValueError with one sentence where they do not fit.
    """

    stages: int
    virtual: int = 1
    microbatches: int = 1

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}: give 1 or more")
        if self.microbatches % self.stages:
            near = max(self.microbatches // self.stages, 1) * self.stages
            raise ValueError(
                f"microbatches is {self.microbatches}, which {self.stages} stages do not divide: "
                f"use {near}"
            )

    @property
    def chunks(self) -> int:
        return self.stages * self.virtual

    @property
    def groups(self) -> int:
        """Of P microbatches, which go through the passes together."""
        return self.microbatches // self.stages

    @property
    def ticks(self) -> int:
        return self.microbatches * self.virtual + self.stages - 1

    @property
    def bubble(self) -> float:
        """Share of its ticks in which a stage waits: (P - 1) / (M V + P - 1)."""
        return (self.stages - 1) / self.ticks

    def item(self, tick: int, stage: int) -> tuple[int, int] | None:
        """(microbatch, chunk) of a stage in a tick; None where it waits."""
        item = tick - stage
        if not 0 <= item < self.microbatches * self.virtual:
            return None
        group, within = divmod(item, self.chunks)
        turn, slot = divmod(within, self.stages)
        return group * self.stages + slot, turn * self.stages + stage

    def taken_up(self, tick: int) -> int | None:
        """The microbatch that the first stage begins in a tick."""
        item = self.item(tick, 0)
        return item[0] if item and item[1] == 0 else None

    def finished(self, tick: int) -> int | None:
        """The microbatch that the last stage is through with after a tick."""
        item = self.item(tick, self.stages - 1)
        return item[0] if item and item[1] == self.chunks - 1 else None

    def layers(self, layers: int) -> list[range]:
        """Layers of each chunk, as even as can be, the longer ones first; ValueError where there
        are fewer layers than chunks."""
        if layers < self.chunks:
            raise ValueError(
                f"{layers} layers are too few for {self.stages} stages of {self.virtual} passes: "
                f"use at most {layers} stages x passes"
            )
        size, longer = divmod(layers, self.chunks)
        starts = [c * size + min(c, longer) for c in range(self.chunks + 1)]
        return [range(a, b) for a, b in itertools.pairwise(starts)]

    def senders(self, tick: int) -> list[tuple[int, int]]:
        """(stage, chunk that comes next) of all stages that hand something on after a tick."""
        items = ((stage, self.item(tick, stage)) for stage in range(self.stages))
        return [(r, item[1] + 1) for r, item in items if item and item[1] + 1 < self.chunks]

    def pairs(self, tick: int) -> Pairs:
        """Of all hand-offs after a tick."""
        return tuple((r, (r + 1) % self.stages) for r, _ in self.senders(tick))


@dataclasses.dataclass(frozen=True)
class Rows:
    """Which rows of the history travel. written: rows in front of each chunk [C]."""

    schedule: Schedule
    written: tuple[int, ...]
    keeps: Keeps = "all"

    def held(self, chunk: int) -> int:
        """Rows that the stage of a chunk holds when it gets there."""
        before = chunk - self.schedule.stages
        if self.keeps == "nothing" or before < 0:
            return 0
        return self.written[before + (self.keeps == "all")]

    @property
    def kept(self) -> int:
        """Rows of a microbatch that a stage has to keep for its backward pass: those in front of
        the last chunk of all, as what a stage writes in its last pass it computes again."""
        return self.written[-1]

    @property
    def pending(self) -> int:
        """Rows whose cotangents wait on a stage until it goes back through its pass before."""
        return max(map(self.held, range(self.schedule.chunks)))

    def at_peak(self, rows: int) -> int:
        """Rows of a microbatch that a stage holds at most, where the history has room for `rows`:
        the kept ones of all microbatches, the cotangents that wait of those of one group, and
        history and cotangents of the chunk that is computed again."""
        schedule = self.schedule
        return schedule.microbatches * self.kept + schedule.stages * self.pending + 2 * rows

    def lacking(self, chunk: int) -> int:
        """Rows that the hand-off to a chunk brings."""
        return self.written[chunk] - self.held(chunk)

    def strips(self, tick: int) -> list[Strip]:
        """What travels after a tick: each pair of stages is in the strips that cover its rows."""
        stages, senders = self.schedule.stages, self.schedule.senders(tick)
        counts = sorted({0, *(self.lacking(chunk) for _, chunk in senders)})
        return [
            Strip(a, b, tuple((r, (r + 1) % stages) for r, c in senders if self.lacking(c) >= b))
            for a, b in itertools.pairwise(counts)
        ]

    def sent(self) -> int:
        """Rows that move between stages, a token, on its way through all chunks."""
        return sum(self.lacking(chunk) for chunk in range(1, self.schedule.chunks))

    def peak(self) -> int:
        """Rows of the largest hand-off."""
        return max((self.lacking(chunk) for chunk in range(1, self.schedule.chunks)), default=0)


def formula(keeps: Keeps, stages: int, virtual: int, rows: float) -> float:
    """Rows that move a token, where each chunk writes `rows` = N_p: C (C - 1) / 2 N_p if stages
    keep nothing, P (P - 1) / 2 N_p + (V - 1) P^2 N_p if they keep what they receive (arXiv
    2603.15031), with P (P - 1) in place of P^2 if they keep their own rows, too."""
    if keeps == "nothing":
        return stages * virtual * (stages * virtual - 1) / 2 * rows
    each = stages * (stages - 1) if keeps == "all" else stages**2
    return (stages * (stages - 1) / 2 + (virtual - 1) * each) * rows
