"""What a run is made of, as frozen dataclasses, and the checks that need no device."""

import dataclasses
from typing import Literal

from depthjax.config.field_types import check_types
from depthjax.errors import InputError
from depthjax.models import Shape, shape_of
from depthjax.residuals import PreLN, Residual


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
class MeshConfig:
    data: int = -1
    """Devices along the axis that divides the batch alone; -1: all that the other axes leave.
    Slices of several pods, or nodes without a fast network, differ along this axis."""
    fsdp: int = 1
    """Devices that divide the batch, and the parameters and optimizer state as well."""
    tensor: int = 1
    """Devices that divide each product with a matrix, and the tokens between two products."""
    sequence: int = 1
    """Devices that divide the tokens of a sequence throughout."""
    stage: int = 1
    """Stages of the pipeline: devices that divide the layers."""
    virtual_stages: int = 1
    """Pieces of the network that each pipeline stage holds, in turn with the other stages."""
    microbatches: int | None = None
    """Pieces of a batch that are in the pipeline one after the other; None: as many as stages."""
    auto: bool = False
    """Choose fsdp, tensor and data for the model and the memory of the devices (`--mesh auto`)."""


@dataclasses.dataclass(frozen=True)
class Config:
    """One run: what is trained, on which text, how, and where it is kept."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    """The network."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    """The text."""
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    """The optimization."""
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    """How the devices are divided; -1 fills in what is left, along one axis."""
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
        check_types(self)
        _ = self.shape, self.residual
        model, train, mesh, run = self.model, self.train, self.mesh, self.run
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
            "mesh.virtual_stages": (mesh.virtual_stages, 1),
            "mesh.microbatches": (mesh.microbatches, 1),
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
