"""Configs out of files and into JSON."""

import dataclasses
import importlib.util
import inspect
import json
import pathlib
import sys
import types
import typing
import zlib
from collections.abc import Mapping
from typing import Any

from depthjax.config.fields import Config
from depthjax.errors import InputError, suggest
from depthjax.residuals import REGISTRY, Residual

OWN_VARIANT = "residual.py"
"""In a run's directory or a model folder, the source of a residual connection from outside of
depthjax."""


def residual_named(name: str) -> Residual:
    """The variant called `name` with its defaults; InputError with the nearest names otherwise."""
    if name not in REGISTRY:
        raise InputError(f"model.residual is {name!r}: choose from {', '.join(sorted(REGISTRY))}")
    return REGISTRY[name]()


def load_config(path: str, shape: str | None = None, residual: str | None = None) -> Config:
    """The config that the Python file at `path` returns, or a run or model folder's config.json
    holds, its dials set where given."""
    file = pathlib.Path(path)
    if file.suffix == ".json":
        return with_dials(shape, residual, from_json(file))
    if not file.is_file():
        raise InputError(
            f"config file {path} does not exist: give a Python file such as those in configs/"
        )
    given = {"shape": shape, "residual": residual}
    try:
        module = import_file(path)
        dials = inspect.signature(module.config).parameters
        config = module.config(**{k: v for k, v in given.items() if v is not None and k in dials})
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's file may raise
        raise InputError(
            f"config file {path} has no config() that works: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(config, Config):
        raise InputError(
            f"config() in {path} returns {type(config).__name__}: return a depthjax.config.Config"
        )
    return with_dials(shape, residual, config)


def import_file(path: str | pathlib.Path) -> types.ModuleType:
    """The Python file at `path` as a module; what it defines, such as residual connections, is
    registered. InputError where it does not end in .py; else raises what the file raises."""
    file = pathlib.Path(path)
    unique = zlib.crc32(str(file.absolute()).encode())  # files of one name stay apart
    spec = importlib.util.spec_from_file_location(f"depthjax_config_{file.stem}_{unique:x}", file)
    if spec is None or spec.loader is None:
        raise InputError(f"config file {path} is no Python file: give one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses that it defines look themselves up there
    spec.loader.exec_module(module)
    return module


def variant_source(residual: Residual) -> str | None:
    """The source of the module that defines a residual connection outside of depthjax; None for
    those of depthjax, and where there is no file of it, as in an interactive session."""
    module = type(residual).__module__
    if module.partition(".")[0] == "depthjax":
        return None
    try:
        return inspect.getsource(sys.modules[module])
    except (OSError, TypeError):
        return None


def with_dials(shape: str | None, residual: str | None, config: Config | None = None) -> Config:
    """`config` (default: all defaults) with the shape and the residual connection of these names,
    where given; a residual connection that it has already keeps its options."""
    config = config or Config()
    model = config.model
    if shape is not None:
        model = dataclasses.replace(model, shape=shape)
    if residual is not None and residual != model.residual.name:
        model = dataclasses.replace(model, residual=residual_named(residual))
    return dataclasses.replace(config, model=model)


def to_dict(config: Any) -> dict[str, Any]:
    """A config (or a part) as JSON values; a residual connection also says its name."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    values = {k: to_dict(v) if dataclasses.is_dataclass(v) else v for k, v in fields.items()}
    return {"name": config.name, **values} if isinstance(config, Residual) else values


def from_dict(values: Mapping[str, Any], kind: type = Config) -> Any:
    """The inverse of `to_dict`; InputError where a field is unknown."""
    if kind is Residual:
        values = dict(values)
        kind = type(residual_named(values.pop("name")))
    known = typing.get_type_hints(kind)
    fields = {f.name for f in dataclasses.fields(kind)}
    for name in values:
        if name not in fields:
            raise InputError(
                f"field {name!r} is unknown to {kind.__name__}: {suggest(name, fields)}"
            )
    nested = {n: v for n, v in values.items() if dataclasses.is_dataclass(known[n])}
    made = {name: from_dict(value, known[name]) for name, value in nested.items()}
    return kind(**{**values, **made})


def from_json(file: pathlib.Path) -> Config:
    """The config that a JSON file holds; InputError where it holds none. A residual connection that
    is not registered may be defined in OWN_VARIANT beside it."""
    try:
        values = json.loads(file.read_text())
        if isinstance(remat := values["model"].get("remat"), bool):  # as it was before policies
            values["model"]["remat"] = "layer" if remat else "none"
        own = file.with_name(OWN_VARIANT)
        if values["model"]["residual"]["name"] not in REGISTRY and own.exists():
            import_file(own)
        return from_dict(values)
    except InputError as error:
        raise InputError(f"{file} cannot be read: {error}") from error
    except Exception as error:  # damaged JSON, or whatever a variant's own file raises
        raise InputError(f"{file} cannot be read ({error})") from error


def flatten(config: Config | Mapping[str, Any]) -> dict[str, Any]:
    """Dotted field names -> values of a config, or of its JSON form: {"train.steps": 1000, ...}."""

    def walk(prefix: str, values: Mapping[str, Any]):
        for name, value in values.items():
            if isinstance(value, Mapping):
                yield from walk(f"{prefix}{name}.", value)
            else:
                yield f"{prefix}{name}", value

    return dict(walk("", config if isinstance(config, Mapping) else to_dict(config)))
