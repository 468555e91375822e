"""What a report is about: models, each with what was measured of it."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Subject:
    """One model. name: what figures call it. arrays: {diagnostic: {name: array}}; meta: what the
    measurement says of itself; both as `depthjax.probes.measure` lays them out."""

    name: str
    arrays: Mapping[str, Mapping[str, np.ndarray]]
    meta: Mapping[str, Any]

    def get(self, diagnostic: str, array: str) -> np.ndarray | None:
        """None where it was not measured."""
        found = self.arrays.get(diagnostic)
        return None if found is None else np.asarray(found[array])

    def number(self, diagnostic: str, array: str) -> float | None:
        """A scalar among the arrays."""
        found = self.get(diagnostic, array)
        return None if found is None else float(found)


def having(subjects: Iterable[Subject], diagnostic: str) -> list[Subject]:
    """Those of which the diagnostic was measured."""
    return [subject for subject in subjects if diagnostic in subject.arrays]


def cells(
    subjects: Sequence[Subject], value: Callable[[Subject], np.ndarray], first: tuple[int, ...]
) -> list[tuple[Any, ...]]:
    """(model, index..., value) of all that is defined; first: the numbers that indices begin at."""
    return [
        (subject.name, *(i + f for i, f in zip(index, first, strict=True)), float(number))
        for subject in subjects
        for index, number in np.ndenumerate(value(subject))
        if np.isfinite(number)
    ]
