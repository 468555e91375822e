"""The command `depthjax convert`."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import tyro
from flax import nnx
from rich.console import Console

from depthjax.config import OWN_VARIANT, Config, residual_named, variant_source
from depthjax.errors import InputError, suggest
from depthjax.interop import (
    DEPTHJAX,
    FORMATS,
    GGUF_SUFFIX,
    LLAMA,
    check_free,
    config_beside,
    export,
    format_of,
    is_file_name,
    largest_difference,
    load,
    read_gguf,
    read_json,
    read_tensors,
    with_residual,
    write_checkpoint,
)
from depthjax.models import Transformer
from depthjax.overrides import parse
from depthjax.residuals import Residual
from depthjax.train.source import trained_model

_TOKENIZER = "tokenizer.json"


def _convert(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="IN")],
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")],
    from_: Annotated[str | None, tyro.conf.arg(name="from")] = None,
    to: str = DEPTHJAX.name,
    config: str | None = None,
    to_residual: str | None = None,
    block_size_sublayers: int | None = None,
) -> None:
    """Turn a checkpoint into another format, or under another residual connection.

    The formats are:
    - depthjax: a run directory or a model folder; written is a model folder
    - depthbench: .safetensors or .pt with the config as .json beside it, or both in a folder
    - llama: a folder of the Hugging Face hub; or a .gguf file of llama.cpp, to be read
    - kimi_k3: the same with Kimi K3's tensors for mixing over depth

    Args:
        source: File or folder to read.
        out: File or folder to write; it must not exist.
        from_: Format of IN; left out, its config tells.
        to: Format of OUT.
        config: The config of IN, where it is not beside it.
        to_residual: Residual connection to put in place of a plain stream; the function stays.
        block_size_sublayers: Its block size, two sublayers a layer, where it has one.
    """
    say = Console(markup=False, soft_wrap=True, highlight=False).print
    for name, value in {"from": from_, "to": to}.items():
        if value is not None and value not in FORMATS:
            raise InputError(f"--{name} is {value!r}: {suggest(value, FORMATS)}")
    if not (source and out):
        raise InputError("IN or OUT is empty: give a file or a folder")
    if to_residual is None and block_size_sublayers is not None:
        raise InputError("--block-size-sublayers is of use with --to-residual alone: give that too")
    if to == DEPTHJAX.name and is_file_name(pathlib.Path(out)):
        raise InputError(f"OUT is {out!r}, but depthjax's own format is a folder: name one")
    check_free(out)
    ours, model, tokenizer = _read(source, from_, config, say)
    beside = {}
    if tokenizer is not None and to == DEPTHJAX.name:
        beside[_TOKENIZER] = tokenizer
        name = str(pathlib.Path(out).absolute() / _TOKENIZER)
        ours = dataclasses.replace(ours, data=dataclasses.replace(ours.data, tokenizer=name))
    if to_residual is not None:
        plain, residual = model, _residual(to_residual, block_size_sublayers)
        ours, model = with_residual(ours, plain, residual)
        difference = largest_difference(plain, model)
        say(f"log-probabilities on random token ids: at most {difference:.1e} apart")
    tensors, values = export(FORMATS[to], ours, model)
    if variant := variant_source(ours.model.residual):
        beside[OWN_VARIANT] = variant
    write_checkpoint(out, tensors, values, beside)
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    say(
        f"{out}: {to}, {ours.residual.name}, {ours.shape.layers} layers of width "
        f"{ours.shape.width}, {count:,} parameters in {ours.model.param_dtype}"
    )


def _read(
    source: str, name: str | None, config: str | None, say: Any
) -> tuple[Config, Transformer, str | None]:
    """Config, model and, where it brings one, tokenizer of the checkpoint at `source` in the format
    called `name` (None: guess)."""
    path = pathlib.Path(source)
    if not path.exists():
        raise InputError(f"{source} does not exist: give a checkpoint, a file or a folder")
    if path.suffix != GGUF_SUFFIX:
        return *_read_pair(path, name, config, say), None
    if name not in (None, LLAMA.name) or config is not None:
        raise InputError(
            f"{source} is a GGUF file, which is a {LLAMA.name} and says its config itself: leave "
            "out --from and --config"
        )
    values, tensors, tokenizer = read_gguf(path)
    if tokenizer is None:
        say("its tokenizer is of a kind that depthjax does not know: give your own as tokenizer")
    return *load(LLAMA, tensors, values), tokenizer


def _read_pair(
    path: pathlib.Path, name: str | None, config: str | None, say: Any
) -> tuple[Config, Transformer]:
    """Config and model of a checkpoint with a config."""
    source = str(path)
    if name is None and _is_ours(config_beside(path)):
        name = DEPTHJAX.name
    if name == DEPTHJAX.name:
        if config is not None:
            raise InputError(f"--config is {config!r}, but depthjax folders have one: leave it out")
        return trained_model(source, say)
    file = config_beside(path) if config is None else pathlib.Path(config)
    if config is not None and not file.is_file():
        raise InputError(f"--config is {config!r}, which is no file: give the config of {source}")
    if not file.is_file():
        raise InputError(f"the config of {source} is missing: put it at {file}, or give --config")
    values = read_json(file)
    format = FORMATS[name] if name else format_of(values)
    if format is None:
        raise InputError(f"{file} does not tell the format of {source}: give --from")
    if format is DEPTHJAX:
        return _read_pair(path, DEPTHJAX.name, config, say)
    return load(format, read_tensors(path), values)


def _is_ours(file: pathlib.Path) -> bool:
    """Whether there is a config of depthjax in `file`."""
    try:
        return format_of(read_json(file)) is DEPTHJAX
    except InputError:
        return False


def _residual(name: str, block_size_sublayers: int | None) -> Residual:
    """The residual connection called `name`, with a block size where one is given."""
    residual = residual_named(name)
    if block_size_sublayers is None:
        return residual
    if not hasattr(residual, "block_size_sublayers"):
        raise InputError(f"--block-size-sublayers is of no use with {name}, which has no blocks")
    return dataclasses.replace(residual, block_size_sublayers=block_size_sublayers)


def run(arguments: Sequence[str]) -> None:
    """Runs the command; InputError says what is wrong with arguments or checkpoint."""
    prog = "depthjax convert"
    parse(lambda: tyro.cli(_convert, prog=prog, args=list(arguments), use_underscores=True))
