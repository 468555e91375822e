"""The command `depthjax cost`: what a prompt costs under several residual connections."""

import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from depthjax.errors import InputError, suggest

USAGE = """\
usage: depthjax cost --shapes A,B --residuals A,B [options]

What reading a prompt costs, side by side: FLOPs and bytes of keys and values by formula; with
--measure also time and peak memory on the device here. Prints a table, and leaves a page with a
figure, and its numbers.

  --shapes A,B        such as 400m-L16,400m-L32,400m-L70 (`depthjax info` lists them)
  --residuals A,B     residual connections; the others are set against the first
  --tokens T          tokens of a prompt (default 4096)
  --dtype D           bfloat16 (default) or float32
  --measure           compile and run each, with random parameters, on the first device
  --batch N           prompts of a measured run (default 8)
  --out DIR           where cost.html, cost.png and cost.csv go (default cost)
"""
_OPTIONS = ("--shapes", "--residuals", "--tokens", "--dtype", "--batch", "--out")
_VOCAB = 50280  # of the study


def run(arguments: Sequence[str]) -> None:
    """Raises InputError for what cannot be right, before anything is compiled."""
    if "--help" in arguments or "-h" in arguments:
        print(USAGE, end="")
        return
    measure = "--measure" in arguments
    options = _options([a for a in arguments if a != "--measure"])
    configs = _configs(options)
    batch = _whole(options, "batch", 8)
    if options["--batch"] is not None and not measure:
        raise InputError(f"batch is {batch}, but nothing is run: give --measure as well")
    from depthjax.report.output import output_folder

    out = output_folder(options["--out"] or "cost", "cost.html")
    costs = [_cost(config) for config in configs]
    if measure:
        costs = _measured(costs, configs, batch)
    _show(costs, out, measure)


def _options(arguments: Sequence[str]) -> dict[str, str | None]:
    from depthjax.overrides import take

    rest, options = take(arguments, _OPTIONS)
    if rest:
        known = (*_OPTIONS, "--measure")
        raise InputError(f"argument {rest[0]!r} is unknown: {suggest(rest[0], known)}")
    for name in ("--shapes", "--residuals"):
        if options[name] is None:
            raise InputError(f"{name[2:]} is missing: give {name} with commas between the names")
    return options


def _whole(options: dict[str, str | None], name: str, default: int) -> int:
    text = options[f"--{name}"]
    if text is None:
        return default
    if not text.isdecimal() or not 1 <= int(text) < 2**31:
        raise InputError(f"{name} is {text!r}: give a whole number, at least 1")
    return int(text)


def _names(options: dict[str, str | None], option: str) -> list[str]:
    names = options[option].split(",")
    if "" in names or len(set(names)) < len(names):
        raise InputError(f"{option[2:]} is {options[option]!r}: name each once, commas between")
    return names


def _configs(options: dict[str, str | None]) -> list[Any]:
    """One a residual connection and shape, all of a shape one after another."""
    from depthjax.config import Config, ModelConfig, residual_named
    from depthjax.models import SHAPES
    from depthjax.residuals import REGISTRY

    dtype = options["--dtype"] or "bfloat16"
    if dtype not in ("bfloat16", "float32"):
        raise InputError(f"dtype is {dtype!r}: use bfloat16 or float32")
    tokens = _whole(options, "tokens", 4096)
    if tokens < 2:
        raise InputError(f"tokens is {tokens}: give 2 or more")
    shapes, residuals = _names(options, "--shapes"), _names(options, "--residuals")
    for name in shapes:
        if name not in SHAPES:
            raise InputError(f"shapes has {name!r}: {suggest(name, SHAPES)}")
    for name in residuals:
        if name not in REGISTRY:
            raise InputError(f"residuals has {name!r}: {suggest(name, REGISTRY)}")
    sizes = {"vocab": _VOCAB, "context": tokens, "dtype": dtype, "param_dtype": dtype}
    return [
        Config(model=ModelConfig(shape=shape, residual=residual_named(name), **sizes)).check()
        for shape in shapes
        for name in residuals
    ]


def _cost(config: Any) -> Any:
    import jax.numpy as jnp

    from depthjax.plan.prefill import prefill_cost

    model = config.model
    sizes = {"vocab": model.vocab, "tokens": model.context}
    itemsize = jnp.dtype(model.dtype).itemsize
    return prefill_cost(model.shape, config.shape, config.residual, itemsize=itemsize, **sizes)


def _measured(costs: Sequence[Any], configs: Sequence[Any], batch: int) -> list[Any]:
    """The same with what was run."""
    from rich.console import Console

    from depthjax.aot.compile import working
    from depthjax.aot.measure import measure_prefill

    progress, found = Console(file=sys.stderr, markup=False), []
    for number, (cost, config) in enumerate(zip(costs, configs, strict=True), 1):
        text = f"running {cost.residual}, {cost.shape} ({number} of {len(costs)})"
        with working(progress, text):
            seconds, peak = measure_prefill(config, config.model.vocab, batch)
        found.append(dataclasses.replace(cost, batch=batch, seconds=seconds, peak_bytes=peak))
    return found


def _show(costs: Sequence[Any], out: pathlib.Path, measure: bool) -> None:
    import jax
    from rich.console import Console
    from rich.table import Table as Printed

    from depthjax.report.cost import cost_plate
    from depthjax.report.page import Section, Table, write_page

    device = jax.devices()[0].device_kind if measure else None
    base = {cost.shape: cost for cost in costs if cost.residual == costs[0].residual}
    twice = any(cost.flops_published != cost.flops for cost in costs)
    rows = [_cells(cost, base[cost.shape], measure, twice) for cost in costs]
    table = Table(tuple(rows[0]), [tuple(row.values()) for row in rows], text=2)
    printed = Printed()
    for name in table.header:
        printed.add_column(name, no_wrap=name in ("residual", "shape"), justify="right")
    for row in table.rows:
        printed.add_row(*row)
    console = Console(markup=False)
    console.print(printed)
    lead = f"One prompt of {costs[0].tokens:,} tokens, to the logits of its last position."
    figure = Section("The figure", plates=[cost_plate(costs, device)])
    sections = [figure, Section("The numbers", tables=[table])]
    page = write_page(out / "cost.html", "What does a prompt cost?", lead, sections)
    console.print(f"page: {page}", soft_wrap=True, highlight=False)


def _cells(cost: Any, base: Any, measure: bool, twice: bool) -> dict[str, str]:
    """A row of the table, by column; twice: FLOPs are counted in two ways."""

    def text(value: float | None, digits: int) -> str:
        return "–" if value is None else f"{value:,.{digits}f}"

    beyond = 100 * (cost.flops / base.flops - 1)
    published = 100 * (cost.flops_published / base.flops_published - 1)
    cells = {
        "residual": cost.residual,
        "shape": cost.shape,
        "TFLOP": text(cost.flops / 1e12, 3),
        f"beyond {base.residual}": f"{beyond:.2f}%",
        **({"as published": f"{published:.2f}%"} if twice else {}),
        "KV MiB": text(cost.key_value_bytes / 2**20, 1),
    }
    if measure:
        cells |= {
            "peak GiB": text(cost.peak_bytes and cost.peak_bytes / 2**30, 2),
            "seconds": text(cost.seconds, 3),
            "h / 1e9 tokens": text(cost.hours_per_billion_tokens, 1),
        }
    return cells
