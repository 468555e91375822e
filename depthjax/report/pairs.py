"""Figures of pairs of layers: distance, dependence, order (DepthBench, figures 5, 6, 14 to 16)."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from depthjax.report.plate import Plate, drawing
from depthjax.report.style import (
    AMOUNT,
    DISTANCE,
    WIDTH,
    Heat,
    Lines,
    bar_style,
    common_limits,
    draw_lines,
    heat_figure,
)
from depthjax.report.subject import Subject, cells, having

ONE_SCALE = "one colour scale for all models"
FIXED_SCALE = "the same colour scale in every report"


def by_distance(matrix: np.ndarray) -> np.ndarray:
    """[L, L] of distance n = 1..L (rows) and start layer (columns), of pairs [L + 1, L + 1]."""
    states = len(matrix)
    found = np.full((states - 1, states - 1), np.nan)
    for n in range(1, states):
        found[n - 1, : states - n] = np.diagonal(matrix, n)
    return found


def angular_distance(subjects: Sequence[Subject]) -> Plate | None:
    subjects = having(subjects, "angular_distance")
    if not subjects:
        return None

    def values(subject: Subject) -> np.ndarray:
        return by_distance(subject.get("angular_distance", "distance"))

    with drawing():
        figure = heat_figure(
            [Heat(s.name, values(s), first=(0, 1)) for s in subjects],
            color_map=DISTANCE,
            across="start layer ℓ",
            up="distance n",
            meaning="angle between z(ℓ) and z(ℓ + n), over π",
            limits=common_limits([values(s) for s in subjects]),
        )
    return Plate(
        "angular_distance",
        "How far does the representation turn?",
        "Angle between the states ℓ and ℓ + n layers deep, over π, averaged over tokens: dark "
        "means that the layers between turned the representation, light that it kept its "
        "direction; lengths do not count, and whether a turn was of use is not shown.",
        figure,
        ("model", "distance", "start_layer", "angle_over_pi"),
        cells(subjects, values, (1, 0)),
        ONE_SCALE,
    )


def causal_score(subjects: Sequence[Subject]) -> Plate | None:
    return _effects(
        having(subjects, "causal_score"),
        "causal_score",
        "Which layers build on which?",
        "How much a layer's update changes, relative to its size, when an earlier layer is "
        "skipped: dark means that it builds on that layer, light that it would do the same "
        "without it; whether the prediction changes is not shown. {rule}",
        ("skipped layer s", "affected layer ℓ", "change of the update of ℓ"),
        ("model", "skipped_layer", "affected_layer", "causal_score"),
        most=1,
    )


def permutation_score(subjects: Sequence[Subject]) -> Plate | None:
    return _effects(
        having(subjects, "permutation_score"),
        "permutation_score",
        "Does the order of the layers matter?",
        "Relative change of the loss when two layers trade places: dark means that each does its "
        "work only where it stands, light that they are interchangeable; the sign is left out, so "
        "that a better loss would look the same as a worse one. {rule}",
        ("layer ℓ₁", "layer ℓ₂", "|change of the loss| / loss"),
        ("model", "first_layer", "second_layer", "permutation_score"),
        most=0.5,
    )


def routing_permutation_score(subjects: Sequence[Subject]) -> Plate | None:
    return _effects(
        having(subjects, "permutation_score_routing"),
        "permutation_score_routing",
        "Does the order of the connectors matter?",
        "The same when two layers trade their connectors between streams alone, as the released "
        "script of DepthBench does: dark means that routing is particular to its place, light that "
        "it is interchangeable; what the branches do is left out. {rule}",
        ("layer ℓ₁", "layer ℓ₂", "|change of the loss| / loss"),
        ("model", "first_layer", "second_layer", "permutation_score"),
        most=0.5,
    )


def threshold_of(subject: Subject, diagnostic: str) -> float:
    return float(subject.meta["thresholds"][diagnostic.removesuffix("_routing")])


def _effects(subjects, diagnostic, title, caption, axes, columns, most) -> Plate | None:
    """Heat maps of a score of pairs [L, L] of layers, first layer across. most: what the colours
    reach to."""

    def values(subject: Subject) -> np.ndarray:
        return subject.get(diagnostic, "score")

    subjects = [s for s in subjects if np.isfinite(values(s)).any()]  # one layer makes no pair
    if not subjects:
        return None

    heats = []
    for subject in subjects:
        above = np.nan_to_num(values(subject).T) > threshold_of(subject, diagnostic)
        heats.append(
            Heat(subject.name, values(subject).T, dots=above, late=subject.meta["late_from"])
        )
    across, up, meaning = axes
    with drawing():
        figure = heat_figure(
            heats, color_map=AMOUNT, across=across, up=up, meaning=meaning, limits=(0, most)
        )
    threshold = threshold_of(subjects[0], diagnostic)
    rule = (
        f"Dots: above {threshold:g}. Right of the dashed line: the pairs that the shares of late "
        "layers count."
    )
    rows = cells(subjects, values, (0, 0))
    return Plate(diagnostic, title, caption.format(rule=rule), figure, columns, rows, FIXED_SCALE)


_SHARES = {
    "causal_score": ("R_causal", "C", "depend on an earlier one"),
    "permutation_score": ("R_perm", "P", "cannot trade places"),
}


def late_shares(subjects: Sequence[Subject]) -> Plate | None:
    """R_causal and R_perm as bars, and what other thresholds would give."""
    kinds = [name for name in _SHARES if _with_pairs(subjects, name)]
    if not kinds:
        return None
    with drawing():
        figure = Figure(figsize=(WIDTH, 2.55 * len(kinds) + 0.1), layout="constrained")
        grid = figure.subplots(len(kinds), 2, squeeze=False, width_ratios=(1, 1.25))
        for (bars, curves), kind in zip(grid, kinds, strict=True):
            _draw_shares(bars, subjects, kind)
            _draw_curves(curves, subjects, kind)
    rules = []
    for kind in kinds:
        name, symbol, _ = _SHARES[kind]
        threshold = threshold_of(_with_pairs(subjects, kind)[0], kind)
        rules.append(f"{name} is the share with {symbol} > {threshold:g}")
    rows = [
        (subject.name, _SHARES[kind][0], subject.number(kind, "ratio"))
        for kind in kinds
        for subject in _with_pairs(subjects, kind)
    ]
    return Plate(
        "late_shares",
        "How many pairs of late layers work together?",
        "High means that late layers build on each other (R_causal) or do their work only where "
        "they stand (R_perm), low that they are redundant; the shares hang on their thresholds (to "
        "the right: all others), and are neither a number of effective layers nor a gain in loss. "
        f"Late-layer rule: of the pairs whose first layer is ⌈L/4⌉ or later, {'; '.join(rules)}.",
        figure,
        ("model", "share", "value"),
        rows,
    )


def _draw_shares(axes, subjects: Sequence[Subject], kind: str) -> None:
    name, symbol, meaning = _SHARES[kind]
    shown = _with_pairs(subjects, kind)
    threshold = threshold_of(shown[0], kind)
    for row, subject in enumerate(shown):
        value = subject.number(kind, "ratio")
        axes.barh(row, value, height=0.62, **bar_style(list(subjects).index(subject)))
        place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(f"{value:.0%}", (value, row), **place)
    axes.set(title=f"{name}: late layers that {meaning}", xlim=(0, 1.08))
    axes.set_yticks(range(len(shown)), [subject.name for subject in shown])
    axes.set_xlabel(f"share of pairs with {symbol} > {threshold:g}, first layer ≥ ⌈L/4⌉")
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.set_ylim(len(shown) - 0.4, -0.6)


def _with_pairs(subjects: Sequence[Subject], kind: str) -> list[Subject]:
    return [s for s in having(subjects, kind) if late_pairs(s, kind).size]


def late_pairs(subject: Subject, kind: str) -> np.ndarray:
    """The scores of the pairs that count, in ascending order."""
    score = subject.get(kind, "score")[subject.meta["late_from"] :]
    return np.sort(score[np.isfinite(score)])


def _draw_curves(axes, subjects: Sequence[Subject], kind: str) -> None:
    """Share of late pairs above each threshold."""
    names, symbol = [subject.name for subject in subjects], _SHARES[kind][1]
    shown = _with_pairs(subjects, kind)
    threshold = threshold_of(shown[0], kind)
    at = np.linspace(0, 4 * threshold, 81)
    series = {}
    for subject in shown:
        pairs = late_pairs(subject, kind)
        series[subject.name] = at, 1 - np.searchsorted(pairs, at, side="right") / len(pairs)
    panel = Lines("The same at other thresholds", f"threshold on {symbol}", "", series)
    draw_lines(axes, panel, names)
    axes.axvline(threshold, color="#333333", linewidth=1, linestyle=(0, (3, 2)))
    axes.xaxis.set_major_locator(MaxNLocator(8))
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.legend(loc="upper right")
