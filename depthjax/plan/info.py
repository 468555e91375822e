"""What a config stands for, before anything is compiled: sizes, parameters, FLOPs, tokens."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.table import Table

from depthjax.config import Config, build_model
from depthjax.data import load_tokenizer
from depthjax.models import SHAPES, Shape
from depthjax.plan.flops import forward_flops_per_token, prefill_flops, training_flops_per_token
from depthjax.plan.memory import cache_bytes, training_bytes
from depthjax.residuals import REGISTRY, Residual


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
    held = training_bytes(config, vocab, sum(counts.values()))
    dtype = jnp.dtype(model.dtype)
    cache = cache_bytes(config, model.context)
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
        **_residual_facts(residual, shape, dtype),
        "prefill of one context": f"{prefill_flops(*cost) / 1e12:.3g} TFLOP, one position's logits",
        "keys and values of one context": f"{cache / 2**20:,.1f} MiB",
        "parameters; with Adam": f"{held.parameters / 2**30:,.2f} GiB; "
        f"{(held.parameters + held.optimizer) / 2**30:,.2f} GiB",
        "context": f"{model.context:,} tokens",
        "batch": f"{config.train.batch:,} sequences, {config.train.batch * model.context:,} tokens",
        "steps": f"{config.train.steps:,}, of which {config.warmup_steps:,} warmup",
        "peak learning rate": f"{config.peak_lr:g}",
        "training tokens": f"{config.tokens:,}",
        "training FLOPs a token": f"{training_flops_per_token(*cost):,}",
        "training FLOPs": f"{training_flops_per_token(*cost) * config.tokens:.3e}",
    }


def _residual_facts(residual: Residual, shape: Shape, dtype: Any) -> dict[str, str]:
    """What the residual connection says of its own cost, a token."""
    sizes = (shape.layers, shape.width)
    state = residual.state_bytes_per_token(*sizes, dtype)
    carry = residual.carry_bytes_per_token(*sizes, dtype)
    countings = residual.flop_countings(*sizes)
    if len(countings) == 1:
        countings = {"forward": residual.flops_per_token(*sizes)}
    moved = residual.elements_moved(*sizes)
    return {
        **{f"  residual's, {name}": f"{count:,}" for name, count in countings.items()},
        "depth state a token": f"{state:,} bytes, {carry:,} of them carried",
        "moved a token and sublayer": "\n".join(
            f"{elements / shape.width:.4g} D ({name})" for name, elements in moved.items()
        ),
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
