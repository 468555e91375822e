"""What a config stands for, before anything is compiled: sizes, parameters, FLOPs, tokens."""

import math
import re
from typing import Any

import jax
from flax import nnx
from rich.console import Console
from rich.table import Table

from depthjax.config import Config, build_model
from depthjax.data import load_tokenizer
from depthjax.models import SHAPES
from depthjax.plan.flops import forward_flops_per_token, training_flops_per_token
from depthjax.residuals import REGISTRY


def parameter_counts(config: Config, vocab: int) -> dict[str, int]:
    """Parameters by part: embedding, attention, mlp, residual, head."""
    state = nnx.state(nnx.eval_shape(lambda: build_model(config, vocab)), nnx.Param)
    parts = {name: jax.tree.leaves(part) for name, part in nnx.to_pure_dict(state).items()}
    return {name: sum(math.prod(x.shape) for x in leaves) for name, leaves in parts.items()}


def describe(config: Config) -> dict[str, Any]:
    """The facts that `depthjax info CONFIG` prints, by name."""
    shape, residual, model = config.shape, config.residual, config.model
    vocab = model.vocab or load_tokenizer(config.data.tokenizer).vocab_size
    counts = parameter_counts(config, vocab)
    cost = (shape, vocab, model.context, residual)
    return {
        "shape": model.shape,
        "layers": shape.layers,
        "width": shape.width,
        "heads (key-value heads) x size": f"{shape.heads} ({shape.kv_heads}) x {shape.head_dim}",
        "MLP width": shape.mlp_width,
        "vocabulary": vocab,
        "residual connection": str(residual),
        **{f"parameters: {name}": f"{count:,}" for name, count in counts.items()},
        "parameters: total": f"{sum(counts.values()):,}",
        "forward FLOPs a token": f"{forward_flops_per_token(*cost):,}",
        "training FLOPs a token": f"{training_flops_per_token(*cost):,}",
        "context": f"{model.context:,} tokens",
        "batch": f"{config.train.batch:,} sequences, {config.train.batch * model.context:,} tokens",
        "steps": f"{config.train.steps:,}, of which {config.warmup_steps:,} warmup",
        "peak learning rate": f"{config.peak_lr:g}",
        "training tokens": f"{config.tokens:,}",
        "training FLOPs": f"{training_flops_per_token(*cost) * config.tokens:.3e}",
    }


def print_config(config: Config) -> None:
    """Prints `describe(config)` as a table."""
    table = Table(show_header=False)
    for name, value in describe(config).items():
        table.add_row(name, str(value))
    Console().print(table)


def _summary(doc: str) -> str:
    """The first sentence of a docstring, without its citations."""
    text = " ".join(doc.partition("\n\n")[0].split())
    text = re.sub(r" \([^()]*(\d{4}|DepthBench)[^()]*\)", "", text)
    return re.split(r"\. |\.$", text)[0]


def print_shapes() -> None:
    """Prints the known shapes and residual connections."""
    table = Table("model.shape", "layers", "width", "heads", "kv heads", "MLP width", "branches")
    for name, s in SHAPES.items():
        sizes = (s.layers, s.width, s.heads, s.kv_heads, s.mlp_width)
        table.add_row(name, *map(str, sizes), f"{s.branch_parameters() / 1e6:.1f}M")
    connections = Table("model.residual", "what it does")
    for name, variant in sorted(REGISTRY.items()):
        connections.add_row(name, _summary(variant.__doc__ or ""))
    console = Console()
    console.print(table)
    console.print(connections)
