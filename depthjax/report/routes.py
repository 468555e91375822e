"""Figures of how a read mixes what was written before (DepthBench, figures 7 and 9; arXiv
2603.15031, the depth mixing matrix)."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from depthjax.report.plate import Plate, drawing
from depthjax.report.style import (
    AMOUNT,
    WIDTH,
    Heat,
    Lines,
    common_limits,
    heat_figure,
    legend,
    line_figure,
)
from depthjax.report.subject import Subject, cells, having

OWN_SCALE = "a colour scale for each model: compare patterns, not colours"


def path_weights(subjects: Sequence[Subject]) -> Plate | None:
    subjects = having(subjects, "path_weights")
    if not subjects:
        return None

    def values(subject: Subject) -> np.ndarray:
        return subject.get("path_weights", "weights").T

    with drawing():
        figure = heat_figure(
            [Heat(s.name, values(s)) for s in subjects],
            color_map=AMOUNT,
            across="source (0: embedding)",
            up="reading sublayer",
            meaning="",
            limits=None,
        )
    return Plate(
        "path_weights",
        "What does each read take from what was written before?",
        "Weight that the residual connection itself gives to the output of an earlier sublayer, "
        "averaged over tokens: dark means that it arrives strongly, light weakly (or, below zero, "
        "reversed); what branches pass on is not in it, and a weight of one on everything does not "
        "mean that everything matters.",
        figure,
        ("model", "reader", "source", "weight"),
        cells(subjects, values, (0, 0)),
        OWN_SCALE,
    )


def shares(subject: Subject) -> np.ndarray:
    """[R, R]: the mixing matrix with rows of absolute values that sum to one."""
    matrix = np.abs(subject.get("mixing_matrix", "matrix"))
    return matrix / np.nansum(matrix, axis=1, keepdims=True)


def mixing_matrix(subjects: Sequence[Subject]) -> Plate | None:
    subjects = having(subjects, "mixing_matrix")
    if not subjects:
        return None
    heats = [
        Heat(f"{s.name}: before {kind}", shares(s)[: len(shares(s)) - 1][start::2])
        for start, kind in enumerate(("attention", "the MLP"))
        for s in subjects
    ]
    with drawing():
        figure = heat_figure(
            heats,
            color_map=AMOUNT,
            across="source (0: embedding)",
            up="reading layer",
            meaning="share of the read",
            limits=common_limits([shares(s) for s in subjects], 97),
            columns=len(subjects) if len(subjects) <= 4 else None,
        )
    weights = cells(subjects, lambda s: s.get("mixing_matrix", "matrix"), (0, 0))
    parts = cells(subjects, lambda s: np.where(_defined(s), shares(s), np.nan), (0, 0))
    rows = [(*weight, part[-1]) for weight, part in zip(weights, parts, strict=True)]
    return Plate(
        "mixing_matrix",
        "How is each read divided over its sources?",
        "The depth mixing matrix, each row as shares of absolute weights: dark means that a read "
        "rests on that source, light that it hardly enters; sizes of the sources are not in it, so "
        "that a small share of a large one may still decide.",
        figure,
        ("model", "reader", "source", "weight", "share"),
        rows,
        "one colour scale for all models",
    )


def _defined(subject: Subject) -> np.ndarray:
    return np.isfinite(subject.get("mixing_matrix", "matrix"))


def mixing_summary(subjects: Sequence[Subject]) -> Plate | None:
    subjects = having(subjects, "mixing_matrix")
    if not subjects:
        return None
    panels = {
        "look_back": ("Look-back", "sublayers"),
        "entropy": ("Entropy", "nats"),
        "embedding_weight": ("Share of the embedding", ""),
    }
    lines, rows = [], []
    for key, (title, unit) in panels.items():
        series = {}
        for subject in subjects:
            values = subject.get("mixing_matrix", key)
            series[subject.name] = np.arange(len(values)), values
            rows += [(subject.name, key, i, float(v)) for i, v in enumerate(values)]
        lines.append(Lines(title, "reader (last: the head's)", unit, series))
    with drawing():
        figure = line_figure(lines, [subject.name for subject in subjects])
    return Plate(
        "mixing_summary",
        "How far back, and how widely, does each read reach?",
        "Mean distance to the sources, spread over them, and share of the embedding, of each read: "
        "high look-back and entropy mean that old and many sources enter, low that the newest or "
        "a few do; a wide reach alone does not show that what it brings is used.",
        figure,
        ("model", "quantity", "reader", "value"),
        rows,
    )


def newest_source_weight(subjects: Sequence[Subject]) -> Plate | None:
    subjects = having(subjects, "newest_source_weight")
    if not subjects:
        return None
    columns = min(len(subjects), 3)
    rows = -(-len(subjects) // columns)
    with drawing():
        figure = Figure(figsize=(min(WIDTH, 5.6 * columns), 2.8 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for axes, subject in zip(grid.flat, subjects, strict=False):
            _draw_newest(axes, subject)
        for axes in list(grid.flat)[len(subjects) :]:
            axes.set_visible(False)
        handles, labels = grid[0, 0].get_legend_handles_labels()
        legend(figure, dict(zip(labels, handles, strict=True)))
    return Plate(
        "newest_source_weight",
        "Does a read use what has just been computed?",
        "Mean weight on the newest source, the open sum (dark), and on all others (light): high "
        "means that the last results go straight on, low that they wait until a later read; the "
        "line is what equal weights would give, dotted lines are block boundaries, and the sizes "
        "of the sources are not shown.",
        figure,
        ("model", "reader", "weight"),
        cells(subjects, lambda s: s.get("newest_source_weight", "weight"), (1,)),
    )


def _draw_newest(axes, subject: Subject) -> None:
    weight = subject.get("newest_source_weight", "weight")
    equal = 1 / subject.get("newest_source_weight", "sources")
    reader = np.arange(1, len(weight) + 1)
    axes.bar(reader, 1 - weight, bottom=weight, width=0.9, color="#d9d9d9", label="all others")
    axes.bar(reader, weight, width=0.9, color="#0a5c48", label="newest source")
    axes.step(reader, equal, where="mid", color="black", linewidth=1.1, label="equal weights")
    boundaries = subject.meta["block_boundaries"]
    if len(boundaries) < len(weight) - 1:  # else every sublayer is one
        for boundary in boundaries:
            axes.axvline(boundary + 0.5, color="black", linewidth=0.8, linestyle=":")
    axes.set(title=subject.name, xlabel="reader (last: the head's)", ylim=(0, 1))
    axes.set_xlim(0.4, len(weight) + 0.6)
    axes.yaxis.set_major_formatter("{x:.0%}")
