"""What every format of others shares: how its tensors stand for our parameters, and what of a
checkpoint does not fit, listed by name and shape.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from depthjax.config import Config, build_model
from depthjax.errors import InputError
from depthjax.models import Shape, Transformer
from depthjax.residuals import Residual

Tensors = Mapping[str, np.ndarray]
Values = Mapping[str, Any]

_LISTED = 10  # faults of a checkpoint that are spelt out

BRANCHES = tuple(
    f"{branch}/{name}"
    for branch, names in {
        "attention": ("query", "key", "value", "out"),
        "mlp": ("gate", "up", "down"),
    }.items()
    for name in names
)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One of our parameters under their name: {} stands for the layer, and each layer has a tensor
    of its own; without {} one tensor is the whole parameter. ours, theirs: from layout to layout.
    """

    name: str
    ours: Callable[[np.ndarray], np.ndarray] = np.asarray
    theirs: Callable[[np.ndarray], np.ndarray] = np.asarray
    first_layer: int = 0
    missing_last: int = 0
    entries: Callable[[int], int] | None = None
    """How many entries their vector has at a layer, where ours is filled up with zeros."""

    @property
    def by_layer(self) -> bool:
        """Whether each layer has a tensor of its own."""
        return "{}" in self.name

    def names(self, layers: int) -> list[str]:
        """The tensors that make up the parameter, one a layer or one in all."""
        if not self.by_layer:
            return [self.name]
        return [self.name.format(i) for i in range(self.first_layer, layers - self.missing_last)]

    def shape(self, row: tuple[int, ...], layer: int) -> tuple[int, ...]:
        """Of their tensor at a layer, given the shape of our row."""
        if self.entries is not None:
            return (self.entries(layer),)
        return np.shape(self.theirs(np.broadcast_to(np.float32(0), row)))

    def to_ours(self, theirs: np.ndarray, row: tuple[int, ...]) -> np.ndarray:
        """Their tensor as our row."""
        if self.entries is not None:
            return np.pad(theirs, (0, row[0] - theirs.size))
        return self.ours(theirs)

    def to_theirs(self, row: np.ndarray, layer: int) -> np.ndarray:
        """Our row as their tensor."""
        return self.theirs(row if self.entries is None else row[: self.entries(layer)])


def linear(path: str, size: int) -> tuple[Callable, Callable]:
    """(to ours, to theirs) for the weight of a torch Linear, [out, in], that is the branch matrix
    `path`; size: that of a head."""
    if path in ("attention/query", "attention/key", "attention/value"):
        return (
            lambda w: w.T.reshape(w.shape[1], -1, size),  # [H E, D] -> [D, H, E]
            lambda w: w.reshape(w.shape[0], -1).T,
        )
    if path == "attention/out":
        return (
            lambda w: w.T.reshape(-1, size, w.shape[0]),  # [D, H E] -> [H, E, D]
            lambda w: w.reshape(-1, w.shape[-1]).T,
        )
    return np.transpose, np.transpose


@dataclasses.dataclass(frozen=True)
class Format:
    """How others write a model: a config (a dict of JSON values) and named tensors.

    mark: the key that tells their config. ours, theirs: their config as ours and back; `ours`
    raises KeyError for a key that it needs, `theirs` writes down what it can, and `export` finds
    out what got lost. tensors: our parameter path -> their tensor, for every parameter. claims:
    whether a name that stands for no parameter is one too many. arrange, complete: last changes to
    the tensors after reading, and before writing.
    """

    name: str
    mark: str
    ours: Callable[[Values], Config]
    theirs: Callable[[Config], dict[str, Any]]
    tensors: Callable[[Shape, Residual], Mapping[str, Tensor]]
    claims: Callable[[str], bool] = lambda name: True
    arrange: Callable[[Tensors, Values], Tensors] = lambda tensors, values: tensors
    complete: Callable[[Tensors], Tensors] = lambda tensors: tensors


def read_config(format: Format, values: Values) -> Config:
    """Their config as ours; InputError where a key is missing or its value cannot be right."""
    try:
        config = format.ours(values).check()
        if config.model.vocab is None:
            raise KeyError("model.vocab")
    except InputError as error:
        raise InputError(f"in the {format.name} config, {error}") from error
    except KeyError as error:
        raise InputError(
            f"the config has no {error.args[0]!r}, which a {format.name} config needs: add it"
        ) from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InputError(f"the config is no {format.name} config ({error})") from error
    return config


def load(format: Format, tensors: Tensors, values: Values) -> tuple[Config, Transformer]:
    """Their checkpoint as config and model, bf16 if all of it is that may be, else fp32.

    Raises InputError for a config that depthjax has no counterpart of, and one that lists the
    tensors which are missing, left over or of another shape.
    """
    config = read_config(format, values)
    wanted = format.tensors(config.shape, config.residual)
    tensors = format.arrange(tensors, values)
    _check_layers(config, wanted, tensors)
    half = _in_dtype(config, "bfloat16")
    kinds = {
        tensors[name].dtype
        for path, leaf in nnx.to_flat_state(_abstract(half)[1])
        if leaf.dtype == jnp.bfloat16
        for name in wanted["/".join(path)].names(config.shape.layers)
        if name in tensors
    }
    config = half if kinds == {np.dtype(jnp.bfloat16)} else _in_dtype(config, "float32")
    return config, fill(config, wanted, tensors, format.claims)


def export(format: Format, config: Config, model: Transformer) -> tuple[Tensors, dict[str, Any]]:
    """The model as (their tensors, their config); InputError for what they have no word for."""
    values = format.theirs(config)
    given, kept = function_fields(config), function_fields(format.ours(values))
    for name, value in given.items():
        if kept.get(name) != value:
            raise InputError(
                f"{name} is {value!r}, which a {format.name} checkpoint cannot say: "
                "choose another format with --to"
            )
    tensors = named(model, format.tensors(config.shape, config.residual))
    return format.complete(tensors), values


def function_fields(config: Config) -> dict[str, Any]:
    """The fields of a config that say which function its parameters are of."""
    shape, residual = config.shape, config.residual
    said = {"model.residual": residual.name}
    said |= {f"model.residual.{n}": v for n, v in dataclasses.asdict(residual).items()}
    said |= {f"model.{n}": v for n, v in dataclasses.asdict(shape).items()}
    return {**said, "model.vocab": config.model.vocab, "model.rope_theta": config.model.rope_theta}


def _in_dtype(config: Config, dtype: str) -> Config:
    model = dataclasses.replace(config.model, dtype=dtype, param_dtype=dtype)
    return dataclasses.replace(config, model=model)


def _abstract(config: Config) -> tuple[nnx.GraphDef, nnx.State]:
    """The model without its numbers."""
    return nnx.split(nnx.eval_shape(lambda: build_model(config, config.model.vocab)))


def fill(
    config: Config,
    wanted: Mapping[str, Tensor],
    tensors: Tensors,
    claims: Callable[[str], bool] = lambda name: True,
    trouble: str = "the checkpoint does not fit its config",
) -> Transformer:
    """The model of a config (which says its vocabulary) with the numbers in `tensors`.

    Raises InputError, `trouble` and after it the tensors that are missing, left over, of another
    shape, or no float, the first few of them by name.
    """
    _check_layers(config, wanted, tensors)
    layers = config.shape.layers
    graph, state = _abstract(config)
    known = {name for tensor in wanted.values() for name in tensor.names(layers)}
    faults = [
        f"{name} with shape {np.shape(value)} is not part of it"
        for name, value in tensors.items()
        if claims(name) and name not in known
    ]
    filled = {}
    for path, leaf in nnx.to_flat_state(state):
        tensor, filled[path] = wanted["/".join(path)], leaf
        rows = leaf.shape[1:] if tensor.by_layer else leaf.shape
        names = dict(enumerate(tensor.names(layers), tensor.first_layer))
        found = (_fault(tensors, name, tensor.shape(rows, i)) for i, name in names.items())
        faults += filter(None, found)
        if not faults:
            parts = [tensor.to_ours(np.asarray(tensors[name]), rows) for name in names.values()]
            value = np.stack(parts) if tensor.by_layer else parts[0]
            filled[path] = leaf.replace(jnp.array(value, leaf.dtype))
    if faults:
        more = len(faults) - _LISTED
        listed = [*faults[:_LISTED], *([f"and {more} more"] if more > 0 else [])]
        raise InputError(f"{trouble}: {'; '.join(listed)}")
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _check_layers(config: Config, wanted: Mapping[str, Tensor], tensors: Tensors) -> None:
    """Raises InputError where each layer has tensors of its own, and there are not even as many
    tensors as layers: the missing ones would be too many to list."""
    layers = config.shape.layers
    if layers > len(tensors) and any(tensor.by_layer for tensor in wanted.values()):
        raise InputError(
            f"the config says {layers} layers, but the checkpoint has {len(tensors)} tensors in "
            "all: correct the number of layers, or give the whole checkpoint"
        )


def _fault(tensors: Tensors, name: str, shape: tuple[int, ...]) -> str | None:
    """What is wrong with a tensor that should have `shape`; None if nothing is."""
    if name not in tensors:
        return f"{name} is missing, of shape {shape}"
    if np.shape(tensors[name]) != shape:
        return f"{name} has shape {np.shape(tensors[name])}, not {shape}"
    kind = np.asarray(tensors[name]).dtype
    return None if jnp.issubdtype(kind, jnp.floating) else f"{name} holds {kind}, not floats"


def named(model: Transformer, wanted: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """The parameters under their names and in their layouts: the inverse of `fill`."""
    tensors = {}
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        tensor, value = wanted["/".join(path)], np.asarray(leaf[...])
        rows = value if tensor.by_layer else value[None]
        names = enumerate(tensor.names(model.shape.layers), tensor.first_layer)
        for (layer, name), row in zip(names, rows, strict=True):
            tensors[name] = np.asarray(tensor.to_theirs(row, layer), order="C")
    return tensors
