"""Where parameters come from that were trained before: a run's newest checkpoint, or a model
folder."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from depthjax.config import Config, MeshConfig
from depthjax.data import load_tokenizer
from depthjax.errors import InputError
from depthjax.interop import (
    DEPTHJAX,
    fill,
    function_fields,
    is_model_folder,
    read_folder,
    with_vocab,
)
from depthjax.models import Transformer
from depthjax.parallel import make_mesh
from depthjax.train.checkpoint import Checkpoints
from depthjax.train.run_dir import check_unchanged, saved_config
from depthjax.train.step import Program, TrainState


def newest_state(config: Config, program: Program, say: Callable[[str], None]) -> TrainState:
    """The newest checkpoint of `config.run.dir`; InputError where there is none that fits."""
    folder = pathlib.Path(config.run.dir) / "checkpoints"
    checkpoints = Checkpoints(folder, keep=None, say=say) if folder.is_dir() else None
    restored = checkpoints and checkpoints.restore(
        program.abstract_state(), lambda meta: check_unchanged(meta["config"], config) is not None
    )
    if not restored:
        raise InputError(f"run.dir {config.run.dir} holds no checkpoint: train it first")
    return restored[0]


def trained_model(path: str, say: Callable[[str], None]) -> tuple[Config, Transformer]:
    """Config (its vocabulary spelt out) and model of a model folder or a run directory."""
    if is_model_folder(path):
        config, _ = read_folder(path)
        return config, folder_model(config, path)
    return configured_model(saved_config(path).check(), say)


def configured_model(config: Config, say: Callable[[str], None]) -> tuple[Config, Transformer]:
    """The same of what is in `config.run.dir`, with other activations and the like if the config
    says so."""
    vocab = config.model.vocab or load_tokenizer(config.data.tokenizer).vocab_size
    if is_model_folder(config.run.dir):
        config = with_vocab(config, vocab)
        return config, folder_model(config, config.run.dir)
    alone = dataclasses.replace(config, mesh=MeshConfig())
    program = Program(config, vocab, make_mesh(alone, jax.devices()[:1]))
    model = program.model(newest_state(config, program, say).params)
    return with_vocab(config, vocab), model


def folder_model(config: Config, path: str, name: str = "run.dir") -> Transformer:
    """The model of `config` with the parameters in the model folder at `path`.

    Raises InputError that lists the parameters which do not fit, by name and shape, or else the
    settings under which the same parameters would be another function. name: the field that says
    the path.
    """
    try:
        saved, tensors = read_folder(path)
    except InputError as error:
        raise InputError(f"{name} is {path!r}: {error}") from error
    wanted = DEPTHJAX.tensors(config.shape, config.residual)
    trouble = f"{name} is {path!r}, whose parameters do not fit this config"
    model = fill(config, wanted, tensors, trouble=trouble)
    here, there = function_fields(config), function_fields(saved)
    others = [f"{n}: {v!r}, here {here.get(n)!r}" for n, v in there.items() if here.get(n) != v]
    if others:
        raise InputError(
            f"{name} is {path!r}, whose parameters are of another function "
            f"({', '.join(others)}): set these alike"
        )
    return model


def parameters_of_folder(
    config: Config, program: Program, vocab: int, path: str, name: str = "run.dir"
) -> Any:
    """The parameters of `folder_model` as a nested dict, as the program has them on its devices."""
    model = folder_model(with_vocab(config, vocab), path, name)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return jax.device_put(params, program.shardings.params)
