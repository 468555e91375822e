"""A comparison as a picture: bars against the first entry."""

import pathlib
from collections.abc import Sequence

from depthjax.aot.entry import Entry
from depthjax.aot.report import big, duration, gib

_PANELS = (
    ("peak memory", lambda e: e.peak_bytes, gib),
    ("temporaries", lambda e: e.temp_bytes, gib),
    ("HBM traffic", lambda e: e.hbm_bytes, lambda v: big(v, "B")),
    ("FLOPs as compiled", lambda e: e.flops_compiled, lambda v: big(v, "FLOP")),
    ("roofline time", lambda e: e.roofline, duration),
    ("compile time", lambda e: e.compile_cpu_s, lambda v: f"{v:.0f} CPU s"),
)


def draw(entries: Sequence[Entry], path: pathlib.Path) -> pathlib.Path | None:
    """Writes the picture; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    first, names = entries[0], [entry.variant for entry in entries]
    panels = [panel for panel in _PANELS if panel[1](first)]
    figure = Figure(figsize=(11, 2 * (1.1 + 0.34 * len(entries))), layout="constrained")
    title = f"{first.shape}, {first.program}, {first.topology}: per device, against {first.variant}"
    if not all(entry.fits for entry in entries):
        title += " (red: does not fit)"
    figure.suptitle(title)
    all_axes = figure.subplots(2, 3, sharey=True).flat
    for axes, (title, value, text) in zip(all_axes, panels, strict=False):
        values = [value(entry) for entry in entries]
        ratios = [0.0 if v is None else v / values[0] for v in values]
        colors = ["tab:gray", *("tab:blue" if e.fits else "tab:red" for e in entries[1:])]
        axes.barh(names, ratios, color=colors, height=0.7)
        axes.axvline(1, color="black", linewidth=0.8)
        for row, (v, r) in enumerate(zip(values, ratios, strict=True)):
            label = "not known" if v is None else f"{r:.2f}x  {text(v)}"
            axes.text(r + 0.02 * max(ratios), row, label, va="center", fontsize=8)
        axes.set(title=title, xlim=(0, 1.65 * max(ratios)))
        axes.title.set_fontsize(10)
        axes.tick_params(labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in list(figure.axes)[len(panels) :]:
        axes.set_visible(False)
    figure.axes[0].invert_yaxis()  # the first on top; the rows share it
    figure.savefig(path, dpi=150)
    return path
