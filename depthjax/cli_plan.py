"""The command `depthjax plan`: what a config costs on devices that are not there."""

import functools
import json
import os
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

from depthjax.errors import InputError

USAGE = """\
usage: depthjax plan CONFIG [options] [--field value ...]

Compiles the training step of CONFIG for a pod, and counts what it costs a device.

  --topology T    v4:2x2x4, v5e:4x4, v5p:4x4x4, v6e:16x16, tpu7x:2x2x1, h100:8, or cpu (the
                  default); 2xv5p:4x4x4 for two slices; TPUs need the extra `plan`, GPUs the
                  extra `plan-cuda`
  --mesh A=N,B=M  how the devices are divided: data, fsdp, tensor, sequence, stage; data takes what
                  is left; --mesh auto chooses
  --compare A,B   these residual connections, in a table and a picture, against the first
  --prefill T     the forward over one sequence of T tokens, in place of training; one each along
                  data and fsdp
  --chunk N       of a prefill, take N tokens at a time, into the cache of keys and values
  --decode T      one more token behind T tokens of one sequence each along data and fsdp, in place
                  of training; --decode 16x2048: of 16 sequences each, 2048 tokens long
  --effort O0     compile fast; good for ratios, not for absolute bytes
  --json FILE     write all figures
  --picture FILE  where the picture of a comparison goes (default plan.png)

       depthjax plan --pipeline P,V,N [--picture FILE]

  --pipeline P,V,N  without CONFIG: what P stages of V passes hand on of N blocks, by formula and in
                  a compiled program; and the schedule of M microbatches, P,V,N,M (default 2 P)

Every field of CONFIG can be overridden: `depthjax train --help` lists them.
"""
_OPTIONS = (
    *("--topology", "--compare", "--prefill", "--chunk", "--decode"),
    *("--effort", "--json", "--picture"),
)
NO_PICTURE = 'no picture: it needs matplotlib, pip install "depthjax[plots]"'


def run(arguments: Sequence[str]) -> None:
    """Raises InputError for what cannot be right, before anything is compiled."""
    if "--help" in arguments or "-h" in arguments:
        print(USAGE, end="")
        return
    if "--pipeline" in arguments:
        _pipeline(arguments)
        return
    if not arguments or arguments[0].startswith("-"):
        raise InputError(
            "depthjax plan needs a config file, such as configs/depthbench.py, before its options"
        )
    from depthjax.aot.topology import prepare_environment, target
    from depthjax.overrides import take

    rest, options = take(arguments[1:], _OPTIONS)
    inference = _inference(options["--prefill"], options["--chunk"], options["--decode"])
    topology = options["--topology"]
    wanted = target("cpu" if topology is None else topology)
    for name in ("--json", "--picture"):
        _check_file(name, options[name])
    prepare_environment(wanted)
    configs = _configs(arguments[0], rest, options["--compare"])
    entries = _entries(configs, wanted, options["--effort"], inference)
    _show(entries, options)


def _pipeline(arguments: Sequence[str]) -> None:
    """Prints what the stages of a pipeline hand on, and its schedule."""
    from depthjax.overrides import take

    rest, options = take(arguments, ("--pipeline", "--picture"))
    text = options["--pipeline"] or ""
    if rest:
        raise InputError(f"{rest[0]} is given beside pipeline, which takes no config: leave it out")
    if not re.fullmatch(r"\d{1,4}(,\d{1,4}){2,3}", text):
        raise InputError(
            f"pipeline is {text!r}: give stages, passes and blocks, such as 4,2,8, and microbatches"
            " if you like, such as 4,2,8,16"
        )
    stages, passes, blocks, *microbatches = map(int, text.split(","))
    _check_file("--picture", options["--picture"])
    if min(stages, passes, blocks, *microbatches) < 1:
        raise InputError(f"pipeline is {text}: give positive numbers")
    from rich.console import Console

    from depthjax.aot.topology import prepare_environment, target

    prepare_environment(target(f"cpu:{stages}"))  # before anything of JAX starts
    from depthjax.parallel.schedule import Schedule

    try:
        schedule = Schedule(stages, passes, *microbatches or [2 * stages])
    except ValueError as error:
        raise InputError(f"pipeline is {text}: {error}") from error
    from depthjax.aot.compile import working
    from depthjax.aot.pipeline import draw_schedule, print_hand_offs, print_schedule

    console = Console(markup=False)
    with working(Console(file=sys.stderr, markup=False), f"compiling for {stages} stages"):
        print_hand_offs(schedule, blocks, console)
    print_schedule(schedule, console)
    if options["--picture"]:
        path = draw_schedule(schedule, pathlib.Path(options["--picture"]))
        console.print(f"picture: {path}" if path else NO_PICTURE, soft_wrap=True, highlight=False)


def _inference(
    prefill: str | None, chunk: str | None, decode: str | None
) -> tuple[str, int, int, int | None] | None:
    """(kind, tokens, sequences a device, tokens at a time); None: training."""
    if prefill is not None and decode is not None:
        raise InputError("prefill and decode are both given: plan one of them at a time")
    if chunk is not None and prefill is None:
        raise InputError(f"chunk is {chunk!r}, but nothing is prefilled: give --prefill T as well")
    if prefill is not None:
        if not re.fullmatch("[0-9]+", prefill) or not 2 <= int(prefill) < 2**31:
            raise InputError(f"prefill is {prefill!r}: give a number of tokens, at least 2")
        if chunk is not None and not (
            re.fullmatch("[0-9]+", chunk) and 1 <= int(chunk) <= int(prefill)
        ):
            raise InputError(f"chunk is {chunk!r}: give 1 to {prefill} tokens, as --prefill says")
        return "prefill", int(prefill), 1, None if chunk is None else int(chunk)
    if decode is None:
        return None
    found = re.fullmatch("(?:([0-9]+)x)?([0-9]+)", decode)
    rows, tokens = (int(n or 1) for n in found.groups()) if found else (0, 0)
    if not (1 <= rows < 2**31 and 1 <= tokens < 2**31):
        raise InputError(
            f"decode is {decode!r}: give the number of tokens in the cache, such as 2048, or "
            "16x2048 for 16 sequences a device"
        )
    return "decode", tokens, rows, None


def _check_file(name: str, path: str | None) -> None:
    if path is None:
        return
    file = pathlib.Path(path).absolute()
    if not path or not file.parent.is_dir():
        raise InputError(f"{name[2:]} is {path!r}: its folder does not exist")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise InputError(f"{name[2:]} is {path!r}: give a file that can be written")
    if name == "--picture" and file.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"picture is {path!r}: give a name that ends in .png, .svg or .pdf")


def _configs(path: str, rest: Sequence[str], compare: str | None) -> list[Any]:
    """The checked configs, one a residual connection."""
    from depthjax.config import load_config, residual_named
    from depthjax.overrides import override

    def load(*extra: str):
        reader = functools.partial(load_config, path)
        return override(reader, [*rest, *extra], "depthjax plan CONFIG", _OPTIONS).check()

    if compare is None:
        return [load()]
    names = compare.split(",")
    load()  # a config file may bring its own residual connections
    if "" in names:
        raise InputError(f"compare is {compare!r}: name residual connections, with commas between")
    for name in names:
        try:
            residual_named(name)
        except InputError as error:
            raise InputError(str(error).replace("model.residual", "compare", 1)) from error
    if len(set(names)) < len(names):
        raise InputError(f"compare is {compare}: name each residual connection once")
    configs = []
    for name in names:
        try:
            configs.append(load("--model.residual", name))
        except InputError as error:
            raise InputError(f"compare, {name}: {error}") from error
    return configs


def _entries(configs, wanted, effort: str | None, inference) -> list[Any]:
    from rich.console import Console

    from depthjax.aot.compile import Inference, effort_options, working
    from depthjax.aot.entry import make_entry
    from depthjax.aot.topology import devices_of
    from depthjax.data import load_tokenizer
    from depthjax.parallel import make_mesh
    from depthjax.plan import with_mesh

    options = effort_options(effort, wanted.platform)
    devices = devices_of(wanted)
    progress = Console(file=sys.stderr, markup=False)
    program = None if inference is None else Inference(*inference)
    tokens = program and program.advanced
    meshes = [make_mesh(with_mesh(config, devices), devices, tokens) for config in configs]
    entries = []
    for number, (config, mesh) in enumerate(zip(configs, meshes, strict=True), 1):
        vocab = config.model.vocab or load_tokenizer(config.data.tokenizer).vocab_size
        count = f" ({number} of {len(configs)})" if len(configs) > 1 else ""
        text = f"compiling {config.residual.name}, {config.model.shape} for {wanted.name}{count}"
        with working(progress, text):
            entries.append(
                make_entry(config, vocab, wanted, mesh, options=options, inference=program)
            )
    return entries


def _show(entries: Sequence[Any], options: dict[str, str | None]) -> None:
    import jax
    from rich.console import Console

    from depthjax import __version__
    from depthjax.aot.picture import draw
    from depthjax.aot.report import print_comparison, print_entry

    console = Console(markup=False)
    if options["--compare"] is None:
        print_entry(entries[0], console)
    else:
        print_comparison(entries, console)
    if options["--json"]:
        versions = {"depthjax": __version__, "jax": jax.__version__}
        record = {**versions, "effort": options["--effort"] or "full"}
        record["entries"] = [entry.as_dict() for entry in entries]
        pathlib.Path(options["--json"]).write_text(json.dumps(record, indent=2) + "\n")
        console.print(f"figures: {options['--json']}", soft_wrap=True, highlight=False)
    if options["--picture"] or len(entries) > 1:
        path = draw(entries, pathlib.Path(options["--picture"] or "plan.png"))
        console.print(f"picture: {path}" if path else NO_PICTURE, soft_wrap=True, highlight=False)
