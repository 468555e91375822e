"""What reading a prompt costs, side by side (DepthBench, figure 11)."""

import dataclasses
from collections.abc import Callable, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from depthjax.plan.prefill import PrefillCost
from depthjax.report.plate import Plate, drawing
from depthjax.report.style import WIDTH, Lines, bar_style, legend, line_figure

_CAPTION = (
    "Lower is cheaper everywhere. FLOPs and keys and values are formulas, the latter the same for "
    "all residual connections; FLOPs leave out norms and softmax and say nothing of time, which "
    "bytes moved and short products decide. “As published” counts one more source over "
    "the depth at each block boundary than is read."
)
_MEASURED = (
    " Time is measured on {device}, at {batch} prompts of {tokens:,} tokens; peak memory is what "
    "the compiled program holds. Neither says what training costs, or one token of decoding."
)

Values = dict[tuple[str, str], float]  # (what the legend says, shape) -> value


@dataclasses.dataclass(frozen=True)
class _Panel:
    title: str
    unit: str
    values: Values

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for name, _ in self.values))


def cost_plate(costs: Sequence[PrefillCost], device: str | None) -> Plate:
    """Over the depth where several shapes are given, else as bars. device: where the measured
    figures come from; None: there are none."""
    fields = [field.name for field in dataclasses.fields(PrefillCost)]
    rows = [
        ["" if v is None else v for v in (*dataclasses.astuple(c), c.hours_per_billion_tokens)]
        for c in costs
    ]
    caption = _CAPTION
    if device is not None:
        first = costs[0]
        caption += _MEASURED.format(device=device, batch=first.batch, tokens=first.tokens)
    panels = [panel for panel in _panels(costs) if panel.values]
    layers = {cost.shape: cost.layers for cost in costs}
    with drawing():
        figure = _over_depth(panels, layers) if len(layers) > 1 else _bars(panels)
    columns = [*fields, "hours_per_billion_tokens"]
    return Plate("cost", "The cost of reading a prompt", caption, figure, columns, rows)


def _panels(costs: Sequence[PrefillCost]) -> list[_Panel]:
    def known(value: Callable[[PrefillCost], float | None]) -> Values:
        found = {(c.residual, c.shape): value(c) for c in costs}
        return {key: v for key, v in found.items() if v is not None}

    base = costs[0].residual
    of_base = {c.shape: c for c in costs if c.residual == base}
    beyond: Values = {}
    for c in costs:
        first = of_base[c.shape]
        if c.residual != base:
            beyond[c.residual, c.shape] = 100 * (c.flops / first.flops - 1)
        if c.flops_published != c.flops:
            more = 100 * (c.flops_published / first.flops_published - 1)
            beyond[f"{c.residual}, as published", c.shape] = more
    flops, flop_unit = _scaled(known(lambda c: c.flops), {"TFLOP": 1e12, "GFLOP": 1e9})
    kept, kept_unit = _scaled(known(lambda c: c.key_value_bytes), _BYTES)
    peak, peak_unit = _scaled(known(lambda c: c.peak_bytes), _BYTES)
    hours = known(lambda c: c.hours_per_billion_tokens)
    return [
        _Panel("FLOPs (formula)", f"{flop_unit} a prompt", flops),
        _Panel(f"FLOPs beyond {base} (formula)", "%", beyond),
        _Panel("Keys and values (formula)", f"{kept_unit} a prompt", kept),
        _Panel("Peak memory (compiled)", peak_unit, peak),
        _Panel("Time (measured)", "device hours / 1e9 tokens", hours),
    ]


_BYTES = {"GiB": 2.0**30, "MiB": 2.0**20}


def _scaled(values: Values, units: dict[str, float]) -> tuple[Values, str]:
    """In the first unit of which the largest value has one, else in the last, and its name."""
    largest = max(values.values(), default=0)
    unit = next((name for name, size in units.items() if largest >= size), list(units)[-1])
    return {key: value / units[unit] for key, value in values.items()}, unit


def _names(panels: Sequence[_Panel]) -> list[str]:
    return list(dict.fromkeys(name for panel in panels for name in panel.names))


def _over_depth(panels: Sequence[_Panel], layers: dict[str, int]) -> Figure:
    lines = []
    for panel in panels:
        series = {}
        for name in panel.names:
            points = sorted((layers[s], v) for (n, s), v in panel.values.items() if n == name)
            series[name] = tuple(zip(*points, strict=True))
        lines.append(Lines(panel.title, "transformer layers", panel.unit, series))
    return line_figure(lines, _names(panels))


def _bars(panels: Sequence[_Panel]) -> Figure:
    names = _names(panels)
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    size = (WIDTH, rows * (0.9 + 0.3 * len(names)) + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    for axes, panel in zip(
        figure.subplots(rows, columns, squeeze=False).flat, panels, strict=False
    ):
        for row, ((name, _), value) in enumerate(panel.values.items()):
            axes.barh(row, value, height=0.7, **bar_style(names.index(name)))
            place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(f"{value:.3g}", (value, row), fontsize=8, **place)
        axes.set(title=panel.title, xlabel=panel.unit, yticks=[])
        axes.set_xlim(0, 1.22 * max(panel.values.values()))
        axes.invert_yaxis()
    for axes in list(figure.axes)[len(panels) :]:
        axes.set_visible(False)
    legend(figure, {name: Patch(**bar_style(n)) for n, name in enumerate(names)})
    return figure
