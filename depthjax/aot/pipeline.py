"""What the hand-offs of a pipeline move, counted in a compiled program, and its schedule."""

import dataclasses
import functools
import pathlib
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from rich.console import Console
from rich.table import Table

from depthjax.models.sublayers import Sublayers
from depthjax.parallel.schedule import Keeps, Rows, Schedule, formula
from depthjax.parallel.stages import run_stages
from depthjax.plan.hlo import parse
from depthjax.plan.hlo_collectives import permuted_bytes
from depthjax.residuals import KINDS, Residual
from depthjax.residuals.base import empty_history

WIDTH, TOKENS = 4, 2  # of the program that is counted


@dataclasses.dataclass(frozen=True)
class Blocks(Residual):
    """Sums blocks of `size` sublayers into one row each, and reads the sum of all: no variant to
    train with, but as many rows as are asked for."""

    size: int = 1

    def rows_before(self, s):
        return -(-s // self.size)

    def begin(self, embedding, layers):
        return {"open": embedding}, empty_history(embedding, self.rows_before(2 * layers))

    def read(self, params, carry, history, s):
        return self._sum(carry, history, self.rows_before(s)), None, carry, history

    def write(self, params, carry, y, aux, s):
        boundary = s % self.size == 0
        opened = jnp.where(boundary, y, carry["open"] + y)
        return {"open": opened}, (carry["open"], s // self.size, boundary)

    def finish(self, params, carry, history):
        return self._sum(carry, history, len(history))

    @staticmethod
    def _sum(carry, history, count):
        live = (jnp.arange(len(history)) < count).astype(history.dtype)
        return carry["open"] + jnp.tensordot(live, history, 1)


@dataclasses.dataclass(frozen=True)
class HandOffs:
    """In units of d, the width of a row, a token and forward pass. counted: half of what a
    compiled training step moves; open_sum: the same of the carry, which is one d here."""

    keeps: Keeps
    formula: float
    rows: int
    counted: float
    open_sum: float
    peak: int
    """Rows of the largest hand-off."""
    held: int
    """Rows of a microbatch that a stage holds at most, by formula."""


def hand_offs(schedule: Schedule, blocks: int, keeps: Keeps) -> HandOffs:
    """Compiles a pipeline of `blocks` blocks for as many devices of this process as there are
    stages, and counts its permutes."""
    chunks, stages = schedule.chunks, schedule.stages
    multiples = range(chunks, chunks * blocks + 1, chunks)
    layers = next(layers for layers in multiples if 2 * layers % blocks == 0)
    rule = Blocks(2 * layers // blocks)
    sublayers = Sublayers(rule, (lambda w, x, ctx: (w * x, None),) * 2)
    over = functools.partial(run_stages, schedule, layers=layers, keeps=keeps)
    residual: dict[str, Any] = {name: {} for name in (*KINDS, "final")}

    def total(branches, x):
        return jnp.sum(over(sublayers, residual, branches, x)[0])

    x = jnp.ones((schedule.microbatches, TOKENS, WIDTH))
    mesh = jax.make_mesh(
        (stages,), ("stage",), axis_types=(AxisType.Auto,), devices=jax.devices()[:stages]
    )
    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(total, argnums=(0, 1)))
        compiled = step.lower((jnp.ones((layers, WIDTH)),) * 2, x).compile()
    program = parse(compiled.as_text())
    counted = {
        part: permuted_bytes(program, f"hand_off_{part}") / (2 * x.size * x.dtype.itemsize)
        for part in ("rows", "carry")
    }
    written = tuple(rule.rows_before(2 * chunk.start) for chunk in schedule.layers(layers))
    rows = Rows(schedule, written, keeps)
    by_formula = formula(keeps, stages, schedule.virtual, blocks / chunks)
    moved = by_formula, rows.sent(), counted["rows"], counted["carry"], rows.peak()
    return HandOffs(keeps, *moved, held=rows.at_peak(blocks))


def print_hand_offs(schedule: Schedule, blocks: int, console: Console) -> None:
    """A line for each of what a stage may keep."""
    table = Table(
        "a stage keeps", "formula", "counted", "open sum", "sent at once", "held",
        title=f"{schedule.stages} stages x {schedule.virtual} passes, {blocks} blocks: "
        "d a token between stages, forward, and once more backward",
    )  # fmt: skip
    kept = {"nothing": "nothing", "received": "what it was sent", "all": "its own rows, too"}
    for keeps in get_args(Keeps):
        found = hand_offs(schedule, blocks, keeps)
        cells = (f"{n:g}" for n in (found.formula, found.counted, found.open_sum))
        table.add_row(kept[keeps], *cells, f"{found.peak} rows + 1", f"{found.held} rows")
    console.print(table)


def print_schedule(schedule: Schedule, console: Console) -> None:
    """Stage by stage, which microbatch is computed in each tick, and in which pass."""
    size = len(str(schedule.microbatches - 1)) + 2
    console.print(
        f"{schedule.microbatches} microbatches in {schedule.ticks} ticks: a stage waits in "
        f"{schedule.bubble:.1%} of them. Microbatch and pass, by tick:"
    )
    for stage in range(schedule.stages):
        items = (schedule.item(tick, stage) for tick in range(schedule.ticks))
        cells = (f"{i[0]}{_letter(schedule, i[1])}" if i else "." for i in items)
        line = "".join(cell.rjust(size) for cell in cells)
        console.print(f"stage {stage} {line}", soft_wrap=True, highlight=False)


def _letter(schedule: Schedule, chunk: int) -> str:
    return chr(ord("a") + chunk // schedule.stages % 26)


def draw_schedule(schedule: Schedule, path: pathlib.Path) -> pathlib.Path | None:
    """A picture of the schedule; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(max(6, 0.35 * schedule.ticks), 0.5 * schedule.stages + 1.2))
    axes = figure.subplots()
    for stage in range(schedule.stages):
        for tick in range(schedule.ticks):
            item = schedule.item(tick, stage)
            if item is None:
                continue
            shade = (item[1] // schedule.stages + 1) / (schedule.virtual + 1)
            axes.barh(
                stage, 1, left=tick, color=(1 - 0.7 * shade, 1 - 0.4 * shade, 1), edgecolor="w"
            )
            axes.text(tick + 0.5, stage, item[0], ha="center", va="center", fontsize=7)
    axes.set(
        xlim=(0, schedule.ticks), xlabel="tick; numbers: microbatches, shades: passes",
        yticks=range(schedule.stages), ylabel="stage",
        title=f"a stage waits in {schedule.bubble:.1%} of the ticks",
    )  # fmt: skip
    axes.invert_yaxis()
    figure.savefig(path, bbox_inches="tight", dpi=150)
    return path
