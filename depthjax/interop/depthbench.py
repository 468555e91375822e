"""Checkpoints of the DepthBench authors: their tensor names and layouts.

Their Linear weights are [out, in]; ours are [in, out] with heads as an axis of their own.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from depthjax.errors import InputError
from depthjax.models import Shape, Transformer
from depthjax.residuals import BlockAttnRes, FullAttnRes, PreLN, Residual


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """Where one of our parameters stands in their state dict, and how to lay it out."""

    name: str  # with {} for the layer
    layout: Callable[[np.ndarray], np.ndarray] = np.asarray
    first_layer: int = 0


def _names(shape: Shape, residual: Residual) -> dict[str, _Tensor]:
    """Our parameter path -> their tensor."""
    width, size = shape.width, shape.head_dim

    def heads(weight: np.ndarray) -> np.ndarray:  # [H E, D] -> [D, H, E]
        return weight.T.reshape(width, -1, size)

    names = {
        "embedding": _Tensor("embeddings.weight"),
        "head": _Tensor("lm_head.w_out.weight", np.transpose),
        "attention/query": _Tensor("blocks.{}.attention.w_q.weight", heads),
        "attention/key": _Tensor("blocks.{}.attention.w_k.weight", heads),
        "attention/value": _Tensor("blocks.{}.attention.w_v.weight", heads),
        "attention/out": _Tensor(
            "blocks.{}.attention.w_out.weight", lambda w: w.T.reshape(-1, size, width)
        ),
        "mlp/gate": _Tensor("blocks.{}.feed_forward.w1.weight", np.transpose),
        "mlp/up": _Tensor("blocks.{}.feed_forward.w3.weight", np.transpose),
        "mlp/down": _Tensor("blocks.{}.feed_forward.w2.weight", np.transpose),
        "residual/attention/norm": _Tensor("blocks.{}.attention_norm.weight"),
        "residual/mlp/norm": _Tensor("blocks.{}.feed_forward_norm.weight"),
        "residual/final/norm": _Tensor("lm_head.norm.weight"),
    }
    if isinstance(residual, FullAttnRes | BlockAttnRes):
        readers = {"attention": ("blocks.{}.attn_res", 1), "mlp": ("blocks.{}.mlp_res", 0)}
        for reader, (name, first) in {**readers, "final": ("res", 0)}.items():
            names[f"residual/{reader}/query"] = _Tensor(f"{name}_proj.weight", np.ravel, first)
            names[f"residual/{reader}/key_scale"] = _Tensor(
                f"{name}_norm.weight", first_layer=first
            )
    return names


def _residual(config: Mapping[str, Any]) -> Residual:
    eps = {"eps": config["norm_eps"]}
    arch = config["arch"]
    if arch == "preln":
        return PreLN(**eps)
    mix = {**eps, "mix_eps": config["attnres_norm_eps"]}
    if arch == "attnres_full":
        return FullAttnRes(**mix)
    if arch == "attnres_block":
        return BlockAttnRes(block_size_sublayers=config["attnres_block_size"], **mix)
    raise InputError(f"arch is {arch!r}: known are 'preln', 'attnres_full' and 'attnres_block'")


def from_depthbench(
    tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], *, dtype: Any = jnp.float32
) -> Transformer:
    """The authors' checkpoint as a model; `model(input_ids)` returns float32 logits [B, T, V].

    tensors: their state-dict names -> arrays. config: arch, n_layers, d_model, n_heads, n_kv_heads,
    d_ff, vocab_size, rope_theta, norm_eps, and for Attention Residuals attnres_block_size and
    attnres_norm_eps. Raises InputError that lists tensors which are missing or have another shape.
    """
    shape = Shape(
        layers=config["n_layers"],
        width=config["d_model"],
        heads=config["n_heads"],
        kv_heads=config["n_kv_heads"],
        mlp_width=config["d_ff"],
    )
    residual = _residual(config)

    def build() -> Transformer:
        return Transformer(
            shape,
            config["vocab_size"],
            residual,
            rope_theta=float(config["rope_theta"]),
            dtype=dtype,
            rngs=nnx.Rngs(0),
        )

    graph, state = nnx.split(nnx.eval_shape(build))
    names, faults = _names(shape, residual), []

    def fill(path, leaf):
        ours = "/".join(str(key) for key in path)
        theirs = names[ours]
        one = theirs.name.format
        rows = [one(i) for i in range(theirs.first_layer, shape.layers)]
        wanted = rows if "{}" in theirs.name else [theirs.name]
        missing = [name for name in wanted if name not in tensors]
        if missing:
            faults.extend(f"{name} is missing" for name in missing)
            return leaf
        parts = [theirs.layout(np.asarray(tensors[name])) for name in wanted]
        value = np.stack(parts) if "{}" in theirs.name else parts[0]
        if value.shape != leaf.shape:
            faults.append(f"{wanted[0]} has shape {tensors[wanted[0]].shape}")
            return leaf
        return leaf.replace(jnp.asarray(value, leaf.dtype))

    flat = {path: fill(path, leaf) for path, leaf in nnx.to_flat_state(state)}
    if faults:
        raise InputError(f"the checkpoint does not fit its config: {'; '.join(faults)}")
    return nnx.merge(graph, nnx.from_flat_state(flat))
