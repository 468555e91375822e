"""Checkpoints of the DepthBench authors, in and out: their tensor names and layouts.

Their Linear weights are [out, in]; ours are [in, out], with heads as an axis of their own.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from depthjax.errors import InputError
from depthjax.models import Shape, Transformer
from depthjax.residuals import (
    HC,
    KINDS,
    LNS,
    MHC,
    BlockAttnRes,
    CompleteP,
    DeepNorm,
    DepthMuP,
    FullAttnRes,
    Keel,
    MHCNative,
    MHCStatic,
    MoDA,
    PostLN,
    PostLNMoDA,
    PreLN,
    Residual,
    SandwichLN,
)

_THEIR_KIND = {"attention": "attention", "mlp": "feed_forward"}
_BRANCHES = {
    "attention/query": "attention.w_q",
    "attention/key": "attention.w_k",
    "attention/value": "attention.w_v",
    "attention/out": "attention.w_out",
    "mlp/gate": "feed_forward.w1",
    "mlp/up": "feed_forward.w3",
    "mlp/down": "feed_forward.w2",
}
_NORMS = {"norm": "{}_norm.weight", "post_norm": "post_{}_norm.weight"}
_MIXERS = {
    "query": "res_proj.weight",
    "key_scale": "res_norm.weight",
    "source_bias": "res_bias",
}
_MIXER_PREFIX = {"attention": "blocks.{}.attn_", "mlp": "blocks.{}.mlp_", "final": ""}
_LOGIT_SCALE = {
    "attention": "blocks.{}.attnres_logit_scale",
    "mlp": "blocks.{}.mlp_attnres_logit_scale",
    "final": "final_attnres_logit_scale",
}


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One of our parameters in their state dict: its name, {} for the layer, and its layout."""

    name: str
    ours: Callable[[np.ndarray], np.ndarray] = np.asarray
    theirs: Callable[[np.ndarray], np.ndarray] = np.asarray
    first_layer: int = 0
    missing_last: int = 0
    entries: Callable[[int], int] | None = None
    """How many entries theirs has at a layer, where ours is filled up with zeros."""

    def row(self, theirs: np.ndarray, shape: tuple[int, ...], layer: int) -> np.ndarray | None:
        """A tensor of theirs as our row of `shape`; None where its shape is wrong."""
        if self.entries is not None:
            if theirs.shape != (self.entries(layer),):
                return None
            return np.pad(theirs, (0, shape[0] - theirs.size))
        try:
            ours = self.ours(theirs)
        except ValueError:
            return None
        return ours if ours.shape == shape else None

    def names(self, layers: int) -> list[str]:
        """The tensors that make up the parameter, one a layer or one in all."""
        if "{}" not in self.name:
            return [self.name]
        return [self.name.format(i) for i in range(self.first_layer, layers - self.missing_last)]


def _matrix(path: str, size: int) -> tuple[Callable, Callable]:
    """(to ours, to theirs) for a Linear weight; size: that of a head."""
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


def _residual_tensor(kind: str, name: str, first_layer: int, size: int, rule: Residual) -> _Tensor:
    if name in _MIXERS:
        theirs = _MIXER_PREFIX[kind] + _MIXERS[name]
        if name == "query":
            return _Tensor(theirs, np.ravel, lambda w: w[None], first_layer)
        if name == "source_bias" and kind != "final":
            return _Tensor(
                theirs,
                first_layer=first_layer,
                entries=lambda layer: rule.sources(2 * layer + KINDS.index(kind)),
            )
        return _Tensor(theirs, first_layer=first_layer)
    if name == "logit_scale":
        return _Tensor(_LOGIT_SCALE[kind], first_layer=first_layer)
    if kind == "final":
        return _Tensor("lm_head.norm.weight")
    block = "blocks.{}."
    if name == "kv_proj":
        return _Tensor(
            block + "feed_forward.kv_proj.weight",
            lambda w: w.T.reshape(w.shape[1], 2, -1, size),  # [2 K E, D] -> [D, 2, K, E]
            lambda w: w.reshape(w.shape[0], -1).T,
            missing_last=1,
        )
    if name in _NORMS:
        return _Tensor(block + _NORMS[name].format(_THEIR_KIND[kind]), first_layer=first_layer)
    return _Tensor(f"{block}{_THEIR_KIND[kind]}_hyper_connection.{name}", first_layer=first_layer)


def tensor_map(shape: Shape, residual: Residual) -> dict[str, _Tensor]:
    """Our parameter path -> their tensor, for every parameter of the model."""
    tensors = {
        "embedding": _Tensor("embeddings.weight"),
        "head": _Tensor("lm_head.w_out.weight", np.transpose, np.transpose),
    }
    for path, name in _BRANCHES.items():
        if isinstance(residual, MoDA):  # whose branches are wrapped once more
            name = ".".join([name.partition(".")[0], name])
        tensors[path] = _Tensor(f"blocks.{{}}.{name}.weight", *_matrix(path, shape.head_dim))
    for kind, declared in residual.parameters(shape.layers, shape.width).items():
        for name, parameter in declared.items():
            own = (kind, name, parameter.first_layer, shape.head_dim, residual)
            tensor = _residual_tensor(*own)
            tensors[f"residual/{kind}/{name}"] = tensor
    return tensors


def residual_of(config: Mapping[str, Any]) -> Residual:
    """The residual connection that their config (the dict of a parity JSON file) names."""
    arch, eps = config["arch"], config["norm_eps"]
    plain = {
        "preln": PreLN,
        "postln": PostLN,
        "sandwich": SandwichLN,
        "lns": LNS,
        "deepnorm": DeepNorm,
        "keel": Keel,
        "moda_pre": MoDA,
        "moda_post": PostLNMoDA,
    }
    if arch in plain:
        return plain[arch](eps=eps)
    if arch == "lns_depth":
        return LNS(eps=eps, constant=True)
    if arch in ("depth_mup", "completep"):
        scaled = DepthMuP if arch == "depth_mup" else CompleteP
        return scaled(eps=eps, base_layers=config["residual_scaling_base_depth"])
    if arch.startswith("attnres"):
        mix = {"eps": eps, "mix_eps": config["attnres_norm_eps"]}
        mix |= config.get("experimental") or {}
        block = config["attnres_block_size"]
        return FullAttnRes(**mix) if block == 1 else BlockAttnRes(block_size_sublayers=block, **mix)
    streams = {"streams": config["n_streams"], "eps": eps}
    connector = config["hyper_connections"] or {}
    rounds = {"sinkhorn_rounds": connector.get("sinkhorn_iters")}
    if arch == "hc":
        return HC(**streams)
    if arch == "mhc_liger":
        mix = {
            "sinkhorn_delta": connector["liger_sinkhorn_eps"],
            "stream_eps": connector["liger_rms_eps"],
        }
        return MHC(**streams, **rounds, **mix)
    if arch == "mhc_native":
        return MHCNative(**streams, **rounds)
    if arch == "mhc_static":
        return MHCStatic(**streams, **rounds, sinkhorn_tau=connector["sinkhorn_tau"])
    raise InputError(f"arch is {arch!r}, which depthjax does not know")


def from_depthbench(
    tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], *, dtype: Any = jnp.float32
) -> Transformer:
    """The authors' checkpoint as a model; `model(input_ids)` returns float32 logits [B, T, V].

    tensors: their state-dict names -> arrays; names outside a state dict are ignored. config: arch,
    n_layers, d_model, n_heads, n_kv_heads, d_ff, vocab_size, rope_theta, norm_eps, and what the
    architecture needs besides. Raises InputError that lists the tensors which are missing, left
    over or of another shape.
    """
    shape = Shape(
        layers=config["n_layers"],
        width=config["d_model"],
        heads=config["n_heads"],
        kv_heads=config["n_kv_heads"],
        mlp_width=config["d_ff"],
    )
    residual = residual_of(config).bind(shape.layers, (shape.kv_heads, shape.head_dim))
    theta = float(config["rope_theta"])

    def build() -> Transformer:
        options = {"rope_theta": theta, "dtype": dtype, "rngs": nnx.Rngs(0)}
        return Transformer(shape, config["vocab_size"], residual, **options)

    graph, state = nnx.split(nnx.eval_shape(build))
    wanted = tensor_map(shape, residual)
    faults = _left_over(tensors, wanted, shape.layers)
    filled = {}
    for path, leaf in nnx.to_flat_state(state):
        tensor = wanted["/".join(path)]
        names = tensor.names(shape.layers)
        missing = [f"{name} is missing" for name in names if name not in tensors]
        faults += missing
        filled[path] = leaf
        if not missing:
            rows = leaf.shape[1:] if "{}" in tensor.name else leaf.shape
            parts = [
                tensor.row(np.asarray(tensors[name]), rows, layer)
                for layer, name in enumerate(names, tensor.first_layer)
            ]
            faults += [
                f"{name} has shape {np.shape(tensors[name])}"
                for name, part in zip(names, parts, strict=True)
                if part is None
            ]
            if not faults:
                value = np.stack(parts) if "{}" in tensor.name else parts[0]
                filled[path] = leaf.replace(jnp.asarray(value, leaf.dtype))
    if faults:
        raise InputError(f"the checkpoint does not fit its config: {'; '.join(faults)}")
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _left_over(
    tensors: Mapping[str, np.ndarray], wanted: Mapping[str, _Tensor], layers: int
) -> list[str]:
    """State-dict names that no parameter takes. HC's state dicts list the branches twice."""
    known = {name for tensor in wanted.values() for name in tensor.names(layers)}
    prefixes = ("blocks.", "embeddings.", "lm_head.", "res_", "final_")
    return [
        f"{name} with shape {np.shape(value)} is not part of it"
        for name, value in tensors.items()
        if name.startswith(prefixes) and name not in known and "_connection.branch." not in name
    ]


def to_depthbench(model: Transformer) -> dict[str, np.ndarray]:
    """The parameters under the authors' names and layouts: the inverse of `from_depthbench`."""
    wanted = tensor_map(model.shape, model.residual.rule)
    tensors = {}
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        tensor, value = wanted["/".join(path)], np.asarray(leaf[...])
        rows = value if "{}" in tensor.name else value[None]
        for layer, name in enumerate(tensor.names(model.shape.layers), tensor.first_layer):
            row = rows[layer - tensor.first_layer]
            row = row if tensor.entries is None else row[: tensor.entries(layer)]
            tensors[name] = np.array(tensor.theirs(row), order="C")
    return tensors
