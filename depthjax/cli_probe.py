"""The command `depthjax probe`: what the layers of trained models do, as one page of figures."""

import dataclasses
import json
import os
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

from depthjax.errors import InputError, suggest

USAGE = """\
usage: depthjax probe CKPT [CKPT ...] [options]

Measures what the layers of each model do, and draws it, several models side by side. CKPT is a run
directory, whose newest checkpoint is taken, or a model folder. Stopped, the same command goes on.

  --out DIR          where report.html goes, the PNG and CSV of every figure, and a folder of
                     results for each model (default probe)
  --budget B         small (default): what a CPU does in minutes; full: as many tokens as the study
  --only A,B         these diagnostics alone:
{diagnostics}
  --data.dir DIR     folder of token shards whose held-out text is read (default: that of the first
                     model's config)
  --data.tokenizer N the tokenizer that they were made with
"""
_OPTIONS = ("--out", "--budget", "--only", "--data.dir", "--data.tokenizer")
_OWN = "probe.json"  # marks a folder of this command


def run(arguments: Sequence[str]) -> None:
    """Raises InputError for what cannot be right, before anything is loaded."""
    from depthjax.probes.diagnostics import DIAGNOSTICS, check_names
    from depthjax.probes.windows import check_budget

    if "--help" in arguments or "-h" in arguments:
        names = "\n".join(f"                       {name}" for name in DIAGNOSTICS)
        print(USAGE.format(diagnostics=names), end="")
        return
    paths, options = _split(arguments)
    only = None if options["--only"] is None else options["--only"].split(",")
    try:
        check_names(only or ())
    except InputError as error:
        raise InputError(f"only is {options['--only']!r}: {error}") from error
    check_budget(options["--budget"])
    labels = names_of(paths)
    from depthjax.report.output import output_folder

    out = output_folder(options["--out"] or "probe", _OWN)
    models = _load(paths, options["--data.tokenizer"])
    windows = _windows([config for config, _ in models], options)
    out.mkdir(parents=True, exist_ok=True)
    origin = {"checkpoints": dict(zip(labels, paths, strict=True)), "budget": windows.budget}
    (out / _OWN).write_text(json.dumps(origin, indent=2) + "\n")
    _measure(labels, models, windows, out, only)
    _report(labels, paths, out)


def names_of(paths: Sequence[str]) -> list[str]:
    """What figures and folders call the checkpoints: as many of the last parts of their paths as
    tell them apart; InputError where none do, once cleaned of what no file name should have."""
    parts = [pathlib.Path(os.path.abspath(path)).parts[1:] or ("root",) for path in paths]
    longest = max(map(len, parts))
    for depth in range(1, longest + 1):
        found = [re.sub(r"[^\w.+-]", "_", "-".join(part[-depth:])) for part in parts]
        if len(set(found)) == len(found):
            return found
    second = next(i for i, name in enumerate(found) if name in found[:i])
    raise InputError(
        f"{paths[found.index(found[second])]} and {paths[second]} would both be called "
        f"{found[second]}: rename one of them"
    )


def _split(arguments: Sequence[str]) -> tuple[list[str], dict[str, str | None]]:
    """The checkpoints, each once, and the options."""
    from depthjax.overrides import take

    paths, options = take(arguments, _OPTIONS)
    options["--budget"] = options["--budget"] or "small"
    for path in paths:
        if path.startswith("-"):
            name = path.partition("=")[0]
            raise InputError(f"option {name} is unknown: {suggest(name, _OPTIONS)}")
    if not paths:
        raise InputError(
            "depthjax probe needs a run directory, such as runs/quickstart, or a model folder"
        )
    absolute = [os.path.realpath(path) for path in paths]
    for number, path in enumerate(paths):
        if absolute[number] in absolute[:number]:
            raise InputError(f"{path} is named twice: give each checkpoint once")
    return paths, options


def _load(paths: Sequence[str], tokenizer: str | None) -> list[tuple[Any, Any]]:
    """(config, model) of each checkpoint; InputError where one text cannot be read by all."""
    from depthjax.train.source import trained_model

    models = []
    for path in paths:
        config, model = trained_model(path, lambda text: print(text, file=sys.stderr))
        if tokenizer is not None:
            data = dataclasses.replace(config.data, tokenizer=tokenizer)
            config = dataclasses.replace(config, data=data)
        models.append((config, model))
        first, vocab = models[0][0], models[0][1].vocab
        if model.vocab != vocab:
            raise InputError(
                f"{path} has a vocabulary of {model.vocab:,}, but {paths[0]} one of {vocab:,}: "
                "probe apart what cannot read the same text"
            )
        if config.data.tokenizer != first.data.tokenizer:
            raise InputError(
                f"{path} has data.tokenizer {config.data.tokenizer}, but {paths[0]} "
                f"{first.data.tokenizer}: give --data.tokenizer if they are the same"
            )
    return models


def _windows(configs: Sequence[Any], options: dict[str, str | None]) -> Any:
    """The held-out text that all read: of the first checkpoint, or of --data.dir."""
    from depthjax.probes.windows import probe_windows
    from depthjax.train.inputs import open_data

    config = configs[0]
    if options["--data.dir"] is not None:
        data = dataclasses.replace(config.data, dir=options["--data.dir"])
        config = dataclasses.replace(config, data=data).check()
    shards, _ = open_data(config)
    longest = min(config.model.context for config in configs)
    return probe_windows(shards.heldout, options["--budget"], longest)


def _measure(labels, models, windows, out: pathlib.Path, only: Sequence[str] | None) -> None:
    import jax
    from rich.console import Console

    from depthjax.probes.measure import measure
    from depthjax.probes.progress import show_progress

    console = Console(file=sys.stderr, markup=False)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
    for label, (_, model) in zip(labels, models, strict=True):
        with jax.set_mesh(mesh), show_progress(console, label) as progress:
            measure(model, windows, out / label, only=only, progress=progress, name=label)


def _report(labels: Sequence[str], paths: Sequence[str], out: pathlib.Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from depthjax.probes.results import Results
    from depthjax.report.build import summary, write_report
    from depthjax.report.subject import Subject

    subjects = []
    for label, path in zip(labels, paths, strict=True):
        results = Results.load(out / label)
        subjects.append(Subject(label, results.arrays, {**results.meta, "source": path}))
    page = write_report(subjects, out)
    console, found = Console(markup=False), summary(subjects)
    printed = Table("", *labels)
    for number, name in enumerate(found.header[1:], 1):
        printed.add_row(name, *(str(row[number]) for row in found.rows))
    console.print(printed)
    console.print(f"report: {page}", soft_wrap=True, highlight=False)
