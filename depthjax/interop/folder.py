"""depthjax's own format: a model folder, `config.json` beside `model.safetensors`.

The config is that of a run as JSON, its `model.vocab` filled in. Tensors have the paths of our
parameters ("attention/query"), with rows for the layers stacked as the model holds them. The source
of a residual connection from outside of depthjax lies beside them, as in a run's directory.
"""

import dataclasses
import pathlib
from typing import Any

from depthjax.config import OWN_VARIANT, Config, RunConfig, from_dict, from_json, to_dict
from depthjax.errors import InputError
from depthjax.interop.files import read_json, read_tensors
from depthjax.interop.tensors import BRANCHES, Format, Tensor, Tensors, read_config
from depthjax.models import Shape
from depthjax.residuals import Residual

CONFIG_FILE, TENSOR_FILE = "config.json", "model.safetensors"


def _tensors(shape: Shape, residual: Residual) -> dict[str, Tensor]:
    declared = residual.parameters(shape.layers, shape.width)
    paths = [f"residual/{kind}/{name}" for kind, names in declared.items() for name in names]
    return {path: Tensor(path) for path in ("embedding", "head", *BRANCHES, *paths)}


def _theirs(config: Config) -> dict[str, Any]:
    """Without the places of the run that it came from."""
    run = dataclasses.replace(config.run, dir=RunConfig().dir)
    train = dataclasses.replace(config.train, init_from=None)
    return to_dict(dataclasses.replace(config, run=run, train=train))


DEPTHJAX = Format("depthjax", "model", from_dict, _theirs, _tensors)


def is_model_folder(path: str | pathlib.Path) -> bool:
    """Whether there is a model folder at `path`; a run directory is none."""
    return (pathlib.Path(path) / TENSOR_FILE).is_file()


def read_folder(path: str | pathlib.Path) -> tuple[Config, Tensors]:
    """Config and tensors of a model folder; InputError where it is none or cannot be read."""
    file = pathlib.Path(path) / CONFIG_FILE
    if not is_model_folder(path):
        raise InputError(
            f"{path} is no model folder: it has no {TENSOR_FILE} (`depthjax convert` writes one)"
        )
    try:
        if file.with_name(OWN_VARIANT).is_file():
            from_json(file)  # registers the residual connection that is defined there
        return read_config(DEPTHJAX, read_json(file)), read_tensors(path)
    except InputError as error:
        raise InputError(f"{path} is no model folder that can be read: {error}") from error


def with_vocab(config: Config, vocab: int) -> Config:
    """The config with its vocabulary spelt out."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab=vocab))
