"""How figures look: series told apart without colour, heat maps that read in greyscale."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator

WIDTH = 11.4
"""Inches of a figure as wide as the page's column."""

# Dark enough for paper, of growing lightness; no two of a kind share marker and dash.
_COLORS = ("#0b3c78", "#c1440e", "#0a7d5a", "#8d4fa8", "#a37a00", "#2c8fc9", "#555555", "#d0679d")
_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)), (0, (9, 2)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_HATCHES = ("", "///", "...", "xx", "\\\\\\", "++", "oo")

DISTANCE = colormaps["viridis_r"]
AMOUNT = ListedColormap(colormaps["magma_r"](np.linspace(0.08, 1, 256)), "amount")
"""Colour maps, perceptually uniform: darker is always more, and none is as light as the page, which
stands for what is undefined."""


def line_style(index: int) -> dict[str, Any]:
    """Of the series with this number: colour, dash and marker differ at once."""
    return {
        "color": _COLORS[index % len(_COLORS)],
        "linestyle": _DASHES[index % len(_DASHES)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "markersize": 4.5,
        "linewidth": 1.6,
    }


def bar_style(index: int) -> dict[str, Any]:
    """The same of bars: colour and hatch."""
    return {
        "facecolor": _COLORS[index % len(_COLORS)],
        "hatch": _HATCHES[index % len(_HATCHES)],
        "edgecolor": "white",
        "linewidth": 0,
    }


@dataclasses.dataclass(frozen=True)
class Heat:
    """One heat map. values [rows, columns], row 0 at the bottom, NaN where undefined; first: the
    numbers of the first column and row. dots: cells to mark. late: a line in front of this column.
    """

    title: str
    values: np.ndarray
    first: tuple[int, int] = (0, 0)
    dots: np.ndarray | None = None
    late: int | None = None


def heat_figure(
    heats: Sequence[Heat],
    *,
    color_map: Colormap,
    across: str,
    up: str,
    meaning: str,
    limits: tuple[float, float] | None,
    columns: int | None = None,
) -> Figure:
    """Heat maps side by side, up to four in a row or as many as `columns`. limits: of the one
    colour scale that all share; None: each has its own."""
    columns = columns or min(len(heats), 4)
    rows = -(-len(heats) // columns)
    width = min(WIDTH, 4.2 * columns + (0.6 if limits else 0))
    side = width / columns - (0.7 if limits else 1.1)
    figure = Figure(figsize=(width, rows * (side + 0.85)), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    last = None
    for axes, heat in zip(grid.flat, heats, strict=False):
        own = limits or _limits(heat.values)
        last = _draw_heat(axes, heat, color_map, own)
        axes.set(title=heat.title, xlabel=across)
        if limits is None:
            figure.colorbar(last, ax=axes, shrink=0.85, pad=0.02).outline.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel(up)
    for axes in list(grid.flat)[len(heats) :]:
        axes.set_visible(False)
    if limits is not None and last is not None:
        over = any(np.nanmax(heat.values) > limits[1] for heat in heats if heat.values.size)
        bar = figure.colorbar(
            last,
            ax=grid,
            shrink=0.85 / rows,
            aspect=22,
            pad=0.015,
            extend="max" if over else "neither",
            extendfrac=0.035,
        )
        bar.set_label(meaning)
        bar.outline.set_visible(False)
    return figure


def _limits(values: np.ndarray) -> tuple[float, float]:
    """Zero, or the least value where that is below, to the greatest."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    return min(low, 0.0), high if high > min(low, 0.0) else min(low, 0.0) + 1.0


def common_limits(all_values: Sequence[np.ndarray], percentile: float = 100) -> tuple[float, float]:
    """The scale that fits the values of all models; those above the percentile saturate."""
    found = np.concatenate([values[np.isfinite(values)] for values in all_values])
    low, high = _limits(found)
    return low, float(np.percentile(found, percentile)) if percentile < 100 else high


def _draw_heat(axes: Axes, heat: Heat, color_map: Colormap, limits: tuple[float, float]):
    rows, columns = heat.values.shape
    x, y = heat.first
    image = axes.imshow(
        np.ma.masked_invalid(heat.values),
        origin="lower",
        cmap=color_map,
        norm=Normalize(*limits),
        extent=(x - 0.5, x + columns - 0.5, y - 0.5, y + rows - 0.5),
        interpolation="none",
        aspect="auto",
    )
    axes.set_box_aspect(1)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    if heat.dots is not None:
        size = (220 / max(rows, columns)) ** 2 / 60
        dark = image.norm(np.nan_to_num(heat.values)) > 0.45
        for where, color in ((heat.dots & dark, "white"), (heat.dots & ~dark, "black")):
            row, column = np.nonzero(where)
            axes.scatter(column + x, row + y, s=size, color=color, linewidths=0)
    if heat.late is not None:
        axes.axvline(heat.late - 0.5, color="#333333", linewidth=1, linestyle=(0, (3, 2)))
    return image


@dataclasses.dataclass(frozen=True)
class Lines:
    """One panel of lines. series: label -> (x, y). scale: "linear", "log", or "symlog", logarithmic
    beyond ±0.01. level: a value to compare with. bands: label -> (low, high) around its line."""

    title: str
    across: str
    up: str
    series: Mapping[str, tuple[np.ndarray, np.ndarray]]
    scale: str = "linear"
    level: float | None = None
    bands: Mapping[str, tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=dict)


def line_figure(panels: Sequence[Lines], order: Sequence[str], *, height: float = 2.9) -> Figure:
    """Panels side by side, up to three in a row, under one legend; order: the labels whose numbers
    say how they are drawn, so that a model looks the same in every figure."""
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    width = min(WIDTH, 5.7 * columns)
    figure = Figure(figsize=(width, rows * height + 0.3), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        draw_lines(axes, panel, order)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    shown = [label for label in order if any(label in panel.series for panel in panels)]
    legend(figure, {label: Line2D([], [], **line_style(order.index(label))) for label in shown})
    return figure


def legend(figure: Figure, handles: Mapping[str, Any]) -> None:
    """Above all panels, in a row."""
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside upper left",
        ncols=-(-len(handles) // -(-len(handles) // 6)),
        handlelength=3.2,
    )


def draw_lines(axes: Axes, panel: Lines, order: Sequence[str]) -> None:
    """One panel; a model's number in `order` says how it looks."""
    axes.set_yscale(panel.scale, **({"linthresh": 0.01} if panel.scale == "symlog" else {}))
    for label, (x, y) in panel.series.items():
        style = line_style(order.index(label))
        axes.plot(x, y, label=label, **style, markevery=max(1, len(x) // 16))
        if label in panel.bands:
            low, high = panel.bands[label]
            axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)
    if panel.level is not None:
        axes.axhline(panel.level, color="#333333", linewidth=0.9, linestyle=(0, (3, 2)), zorder=0)
    axes.set(title=panel.title, xlabel=panel.across, ylabel=panel.up)
    points = sorted({int(x) for xs, _ in panel.series.values() for x in xs})
    few = len(points) <= 8
    axes.xaxis.set_major_locator(FixedLocator(points) if few else MaxNLocator(8, integer=True))
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
