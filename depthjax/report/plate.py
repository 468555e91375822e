"""A plate: one figure with its caption and the numbers that it shows."""

import contextlib
import csv
import dataclasses
import io
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from depthjax.data.files import write_atomically

_RC = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#555555",
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "none",  # text stays text: it can be selected, and looks as the page does
    "svg.hashsalt": "depthjax",  # the same figure is the same file
}


@dataclasses.dataclass(frozen=True)
class Plate:
    """name: stem of its files. caption: one sentence that says what high and low mean, and what the
    figure does not show. scale: whether its colours may be compared across models; empty where it
    has no colour scale. columns, rows: the numbers, one finite value a row."""

    name: str
    title: str
    caption: str
    figure: Figure
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    scale: str = ""

    def __post_init__(self):
        with drawing():
            self.figure.draw_without_rendering()
        self.figure.set_layout_engine("none")  # laid out once, for every format

    def svg(self) -> str:
        """The figure as an SVG element."""
        text = io.StringIO()
        with drawing():
            nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            self.figure.savefig(text, format="svg", metadata=nothing)
        svg = text.getvalue()
        svg = svg[svg.index("<svg") :]
        used = set(re.findall(r"#([^\s\")]+)", svg))
        # Several figures share one page, where an id may stand only once.
        svg = re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in used else "", svg)
        for mark in ('id="', "url(#", 'href="#'):
            svg = svg.replace(mark, f"{mark}{self.name}-")
        return svg.replace("<svg ", f'<svg role="img" aria-label="{self.title}" ', 1)

    def save(self, folder: pathlib.Path) -> None:
        """Writes NAME.png and NAME.csv."""
        picture, table = io.BytesIO(), io.StringIO()
        with drawing():
            self.figure.savefig(picture, format="png", dpi=180)
        csv.writer(table, lineterminator="\n").writerows([self.columns, *self.rows])
        write_atomically(folder / f"{self.name}.png", picture.getvalue())
        write_atomically(folder / f"{self.name}.csv", table.getvalue().encode())


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Inside, figures are drawn in the house style, whatever the user's settings are."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield
