"""What a run is made of, as frozen dataclasses; their JSON form; and the checks that need no
device.

A config file is a Python module with a function `config() -> Config`. Arguments of that function
called `shape` and `residual` are dials: `--model.shape` and `--model.residual` are handed to it, so
that the recipe can follow them. The command line overrides any field after that.
"""

import dataclasses
import importlib.util
import inspect
import json
import math
import pathlib
import sys
import types
import typing
import zlib
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx

from depthjax.errors import InputError, suggest
from depthjax.models import Remat, Shape, Transformer, shape_of
from depthjax.residuals import REGISTRY, PreLN, Residual

OWN_VARIANT = "residual.py"
"""In a run's directory or a model folder, the source of a residual connection from outside of
depthjax."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    shape: str = "tiny-L8"
    """One dial for layers, width, heads and MLP width: a name such as 400m-L32 (`depthjax info`
    lists them), or `custom` with the next four fields."""
    layers: int | None = None
    """Transformer layers; only with shape custom."""
    width: int | None = None
    """Model width D; only with shape custom."""
    heads: int | None = None
    """Query heads; only with shape custom."""
    mlp_width: int | None = None
    """Inner width of the MLP; only with shape custom."""
    kv_heads: int | None = None
    """Key-value heads; None: those of the shape (custom: as many as heads)."""
    residual: Residual = dataclasses.field(default_factory=PreLN)
    """The residual connection: `--model.residual NAME` picks one, these are its own options."""
    vocab: int | None = None
    """Rows of the embedding; None: the size of the tokenizer."""
    context: int = 2048
    """Tokens in a training sequence."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    init_std: float = 0.02
    """Standard deviation of every matrix at the start (cut at 3 of them)."""
    init_seed: int = 0
    """Seed of the initial parameters."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of activations and products."""
    param_dtype: Literal["bfloat16", "float32"] = "float32"
    """Of the parameters that the optimizer updates."""
    remat: Literal["none", "dots", "sublayer", "layer", "group"] = "none"
    """What the backward pass computes again, beside reads over the depth: none (nothing else), dots
    (all but matrix products), sublayer, layer or group (all, from the state in front of each)."""
    remat_group: int | None = None
    """Layers in a group; None: the square root of their number, rounded."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    dir: str | None = None
    """Folder of token shards (`depthjax data prepare` makes one); None: the embedded corpus."""
    tokenizer: str = "neox"
    """neox (50280 ids, DepthBench's), bpe8k (8192 ids, for tiny models), or a tokenizers JSON."""
    heldout: str = "*013_00008*"
    """Which shards are held out, where the folder has no index.json that says so (glob)."""
    verify: bool = True
    """Check every shard against its checksum before training."""
    seed: int = 42
    """Seed of the order of the training sequences."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    steps: int = 1000
    """Optimizer steps."""
    batch: int = 32
    """Sequences in one optimizer step, over all devices and accumulation."""
    accumulate: int = 1
    """Micro-batches that one step's gradient is summed over."""
    peak_lr: float | None = None
    """Learning rate at the end of the warmup; None: what suits the residual connection."""
    warmup_steps: int | None = None
    """Steps of linear warmup from 0; None: a tenth of all steps."""
    final_lr_ratio: float = 0.1
    """Where the cosine ends, as a fraction of the peak."""
    beta1: float = 0.9
    """Adam: decay of the mean of the gradient."""
    beta2: float = 0.95
    """Adam: decay of the mean of its square."""
    adam_eps: float = 1e-8
    """Adam: epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay of the matrices."""
    decay_vectors: bool = False
    """Decay norm scales and depth queries as well, as the DepthBench authors did."""
    clip_norm: float = 1.0
    """Global L2 norm to which gradients are clipped."""
    guard_norm: float = 1000.0
    """An update whose gradient norm is above this, or not finite, is skipped."""
    guard_patience: int = 10
    """After so many skipped updates in a row the last checkpoint is restored; if it happens again,
    training stops."""
    init_from: str | None = None
    """Model folder whose parameters training starts from (`depthjax convert` writes one)."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    dir: str = "runs/default"
    """Where the run lives: config, metrics, checkpoints, summary. A run found there is resumed."""
    log_every: int = 10
    """Steps between log lines and metric records."""
    eval_every: int = 500
    """Steps between held-out losses during training (0: only at the end)."""
    eval_batches: int | None = None
    """Most batches in one held-out loss; None: all held-out data."""
    save_every: int = 500
    """Steps between checkpoints."""
    keep: int = 2
    """Newest checkpoints to keep."""
    tensorboard: bool = False
    """Also write TensorBoard event files (extra `tb`)."""
    depth_sizes: bool = False
    """Also log, by depth, the RMS of the residual state and of the gradient at branch outputs."""


@dataclasses.dataclass(frozen=True)
class Config:
    """One run: what is trained, on which text, how, and where it is kept."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    """The network."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    """The text."""
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    """The optimization."""
    run: RunConfig = dataclasses.field(default_factory=RunConfig)
    """Bookkeeping."""

    @property
    def shape(self) -> Shape:
        """The sizes that `model.shape` stands for; InputError where they are wrong."""
        model = self.model
        sizes = {n: getattr(model, n) for n in ("layers", "width", "heads", "mlp_width")}
        if model.shape == "custom":
            missing = [f"model.{name}" for name, value in sizes.items() if value is None]
            if missing:
                raise InputError(f"model.shape is custom, which needs {', '.join(missing)} as well")
            kv_heads = model.heads if model.kv_heads is None else model.kv_heads
            return Shape(**sizes, kv_heads=kv_heads)
        named = shape_of(model.shape)
        for name, value in sizes.items():
            if value is not None and value != getattr(named, name):
                raise InputError(
                    f"model.{name} is {value}, but model.shape {model.shape} makes it "
                    f"{getattr(named, name)}: leave it out, or take model.shape custom"
                )
        return dataclasses.replace(
            named, **({} if model.kv_heads is None else {"kv_heads": model.kv_heads})
        )

    @property
    def residual(self) -> Residual:
        """The residual connection with its defaults filled in for this depth."""
        try:
            shape = self.shape
            return self.model.residual.bind(shape.layers, (shape.kv_heads, shape.head_dim))
        except ValueError as error:
            raise InputError(f"model.residual: {error}") from error

    @property
    def peak_lr(self) -> float:
        """`train.peak_lr`, or that of the residual connection."""
        return self.residual.peak_lr if self.train.peak_lr is None else self.train.peak_lr

    @property
    def warmup_steps(self) -> int:
        """`train.warmup_steps`, or a tenth of all steps."""
        warmup = self.train.warmup_steps
        return self.train.steps // 10 if warmup is None else warmup

    @property
    def tokens(self) -> int:
        """Training tokens in all: steps * batch * context."""
        return self.train.steps * self.train.batch * self.model.context

    def check(self) -> "Config":
        """Raises InputError at the first field that cannot be right; else returns the config."""
        _check_types(self)
        _ = self.shape, self.residual
        model, train, run = self.model, self.train, self.run
        folders = {"run.dir": run.dir, "data.dir": self.data.dir}
        folders["train.init_from"] = train.init_from
        for name, path in folders.items():
            if path == "":
                raise InputError(f"{name} is empty: give a directory")
        at_least = {
            "model.context": (model.context, 2),
            "model.vocab": (model.vocab, 2),
            "model.init_seed": (model.init_seed, 0),
            "model.remat_group": (model.remat_group, 1),
            "data.seed": (self.data.seed, 0),
            "train.steps": (train.steps, 1),
            "train.batch": (train.batch, 1),
            "train.accumulate": (train.accumulate, 1),
            "train.guard_patience": (train.guard_patience, 1),
            "train.weight_decay": (train.weight_decay, 0),
            "train.final_lr_ratio": (train.final_lr_ratio, 0),
            "run.log_every": (run.log_every, 1),
            "run.eval_every": (run.eval_every, 0),
            "run.eval_batches": (run.eval_batches, 1),
            "run.save_every": (run.save_every, 1),
            "run.keep": (run.keep, 1),
        }
        for name, (value, least) in at_least.items():
            if value is not None and value < least:
                raise InputError(f"{name} is {value}: give {least} or more")
        names = "adam_eps", "clip_norm", "guard_norm"
        positive = {f"train.{name}": getattr(train, name) for name in names}
        positive |= {"model.rope_theta": model.rope_theta, "model.init_std": model.init_std}
        positive["train.peak_lr"] = self.peak_lr
        for name, value in positive.items():
            if value <= 0:
                raise InputError(f"{name} is {value}: give a positive number")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(train, name) < 1:
                raise InputError(f"train.{name} is {getattr(train, name)}: give one in [0, 1)")
        if not 0 <= self.warmup_steps <= train.steps:
            raise InputError(
                f"train.warmup_steps is {self.warmup_steps}: give 0 to train.steps ({train.steps})"
            )
        if train.batch % train.accumulate:
            raise InputError(
                f"train.batch is {train.batch}, which train.accumulate {train.accumulate} does not "
                "divide"
            )
        if model.remat_group is not None and model.remat != "group":
            group = f"model.remat_group is {model.remat_group}, but model.remat {model.remat}"
            raise InputError(f"{group}: leave it out, or take model.remat group")
        return self

    def check_devices(self, devices: int) -> None:
        """Raises InputError where a micro-batch cannot be divided over `devices`."""
        micro = self.train.batch // self.train.accumulate
        if micro % devices:
            raise InputError(
                f"train.batch is {self.train.batch}: with train.accumulate {self.train.accumulate} "
                f"a micro-batch has {micro} sequences, which {devices} devices do not divide"
            )


def build_model(config: Config, vocab: int) -> Transformer:
    """The freshly initialised network of a config."""
    model = config.model
    group = model.remat_group or round(math.sqrt(config.shape.layers))
    return Transformer(
        config.shape,
        vocab,
        config.residual,
        rope_theta=model.rope_theta,
        init_std=model.init_std,
        dtype=jnp.dtype(model.dtype),
        param_dtype=jnp.dtype(model.param_dtype),
        remat=Remat(model.remat, group),
        rngs=nnx.Rngs(model.init_seed),
    )


def _check_types(config: Any, prefix: str = "") -> None:
    """Raises InputError at the first field whose value is not of its declared type, not finite, or
    an integer beyond 31 bits."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        name, value, hint = f"{prefix}{field.name}", getattr(config, field.name), hints[field.name]
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, hint):
                raise InputError(f"{name} is {value!r}: give a {hint.__name__}")
            _check_types(value, f"{name}.")
        elif not _is_of(value, hint):
            raise InputError(f"{name} is {value!r}: give {_wanted(hint)}")


def _wanted(hint: Any) -> str:
    """The type of a field, in words."""
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(typing.get_args(hint))
    text = getattr(hint, "__name__", str(hint)) if not typing.get_args(hint) else str(hint)
    numeric = {int, float} & {hint, *typing.get_args(hint)}
    return f"{text}, finite and below 2^31 in size" if numeric else text


def _is_of(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    if typing.get_args(hint):  # a union such as int | None
        return any(_is_of(value, option) for option in typing.get_args(hint))
    if hint is float:
        number = isinstance(value, float | int) and not isinstance(value, bool)
        return number and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31
    return isinstance(value, hint)


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
