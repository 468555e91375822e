"""Figures of several streams: what is left of their differences (DepthBench, figure 10)."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from depthjax.report.plate import Plate, drawing
from depthjax.report.style import WIDTH, Lines, draw_lines, line_style
from depthjax.report.subject import Subject, having

_NAME = "transport_effective_rank"


def transport(subjects: Sequence[Subject]) -> Plate | None:
    """Effective rank of the product of all transports, cosine of its streams, its spectrum."""
    shown = having(subjects, _NAME)
    if not shown:
        return None
    names = [subject.name for subject in subjects]
    with drawing():
        figure = Figure(figsize=(WIDTH, 1.9 + 0.28 * len(shown)), layout="constrained")
        rank, cosine, spectrum = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
        _draw_points(rank, shown, names, "effective_rank", "Effective rank")
        _draw_points(cosine, shown, names, "stream_cosine", "|cosine| of streams")
        rank.set_xlim(0.9, max(len(s.get(_NAME, "singular_values")) for s in shown) + 0.1)
        cosine.set_xlim(0, 1.02)
        cosine.set_yticklabels([])
        series, bands = {}, {}
        for subject in shown:
            values = subject.get(_NAME, "singular_values")
            series[subject.name] = np.arange(1, len(values) + 1), values
            bands[subject.name] = tuple(subject.get(_NAME, "singular_values_interval").T)
        panel = Lines("Singular values", "k", "σₖ / σ₁", series, bands=bands)
        draw_lines(spectrum, panel, names)
        spectrum.set_ylim(0, 1.05)
    return Plate(
        _NAME,
        "Do the streams stay different?",
        "The product of all transports between streams, with 95 % bootstrap intervals over "
        "windows: a high effective rank, a low cosine and a flat spectrum mean that streams carry "
        "different things to the end, the reverse that they become one; what branches write anew "
        "on the way is not in it.",
        figure,
        ("model", "quantity", "value", "low", "high"),
        [row for subject in shown for row in _rows(subject)],
    )


def _draw_points(
    axes, shown: Sequence[Subject], names: Sequence[str], key: str, title: str
) -> None:
    for row, subject in enumerate(shown):
        value = subject.number(_NAME, key)
        low, high = subject.get(_NAME, f"{key}_interval")
        style = line_style(names.index(subject.name))
        axes.plot([low, high], [row, row], color=style["color"], linewidth=2)
        axes.plot(value, row, color=style["color"], marker=style["marker"], markersize=7)
        place = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center", "fontsize": 8}
        axes.annotate(f"{value:.2f}", (value, row), **place)
    axes.set(title=title, ylim=(len(shown) - 0.5, -0.6))
    axes.set_yticks(range(len(shown)), [subject.name for subject in shown])
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.7)


def _rows(subject: Subject) -> list[tuple]:
    rows = []
    for key in ("effective_rank", "stream_cosine"):
        interval = (float(v) for v in subject.get(_NAME, f"{key}_interval"))
        rows.append((subject.name, key, subject.number(_NAME, key), *interval))
    values = subject.get(_NAME, "singular_values")
    intervals = subject.get(_NAME, "singular_values_interval")
    for k, (value, interval) in enumerate(zip(values, intervals, strict=True), 1):
        rows.append((subject.name, f"sigma_{k}/sigma_1", float(value), *map(float, interval)))
    return rows
