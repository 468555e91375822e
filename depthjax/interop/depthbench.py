"""Checkpoints of the DepthBench authors, in and out: their tensor names and layouts.

Their Linear weights are [out, in]; ours are [in, out], with heads as an axis of their own.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from depthjax.config import Config, ModelConfig
from depthjax.errors import InputError
from depthjax.interop.tensors import (
    Format,
    Tensor,
    Tensors,
    Values,
    fill,
    linear,
    named,
    read_config,
)
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
_ARCHES = {
    PreLN: "preln",
    PostLN: "postln",
    SandwichLN: "sandwich",
    LNS: "lns",
    DeepNorm: "deepnorm",
    Keel: "keel",
    MoDA: "moda_pre",
    PostLNMoDA: "moda_post",
    HC: "hc",
    MHC: "mhc_liger",
    MHCNative: "mhc_native",
    MHCStatic: "mhc_static",
    FullAttnRes: "attnres_full",
    BlockAttnRes: "attnres_block",
    DepthMuP: "depth_mup",
    CompleteP: "completep",
}
_ABLATIONS = ("logit_scale", "topk", "bias")
_CONNECTOR = {
    "sinkhorn_rounds": "sinkhorn_iters",
    "sinkhorn_tau": "sinkhorn_tau",
    "sinkhorn_delta": "liger_sinkhorn_eps",
    "stream_eps": "liger_rms_eps",
}


def _residual_tensor(kind: str, name: str, first_layer: int, size: int, rule: Residual) -> Tensor:
    if name in _MIXERS:
        theirs = _MIXER_PREFIX[kind] + _MIXERS[name]
        if name == "query":
            return Tensor(theirs, np.ravel, lambda w: w[None], first_layer)
        if name == "source_bias" and kind != "final":
            return Tensor(
                theirs,
                first_layer=first_layer,
                entries=lambda layer: rule.sources(2 * layer + KINDS.index(kind)),
            )
        return Tensor(theirs, first_layer=first_layer)
    if name == "logit_scale":
        return Tensor(_LOGIT_SCALE[kind], first_layer=first_layer)
    if kind == "final":
        return Tensor("lm_head.norm.weight")
    block = "blocks.{}."
    if name == "kv_proj":
        return Tensor(
            block + "feed_forward.kv_proj.weight",
            lambda w: w.T.reshape(w.shape[1], 2, -1, size),  # [2 K E, D] -> [D, 2, K, E]
            lambda w: w.reshape(w.shape[0], -1).T,
            missing_last=1,
        )
    if name in _NORMS:
        return Tensor(block + _NORMS[name].format(_THEIR_KIND[kind]), first_layer=first_layer)
    return Tensor(f"{block}{_THEIR_KIND[kind]}_hyper_connection.{name}", first_layer=first_layer)


def tensor_map(shape: Shape, residual: Residual) -> dict[str, Tensor]:
    """Our parameter path -> their tensor, for every parameter of the model."""
    tensors = {
        "embedding": Tensor("embeddings.weight"),
        "head": Tensor("lm_head.w_out.weight", np.transpose, np.transpose),
    }
    for path, name in _BRANCHES.items():
        if isinstance(residual, MoDA):  # whose branches are wrapped once more
            name = ".".join([name.partition(".")[0], name])
        tensors[path] = Tensor(f"blocks.{{}}.{name}.weight", *linear(path, shape.head_dim))
    for kind, declared in residual.parameters(shape.layers, shape.width).items():
        for name, parameter in declared.items():
            place = (kind, name, parameter.first_layer)
            tensor = _residual_tensor(*place, shape.head_dim, residual)
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
        if arch.startswith("attnres_block"):
            return BlockAttnRes(block_size_sublayers=config["attnres_block_size"], **mix)
        return FullAttnRes(**mix)
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


def _ours(values: Values) -> Config:
    """Their config as ours."""
    return Config(
        model=ModelConfig(
            shape="custom",
            layers=values["n_layers"],
            width=values["d_model"],
            heads=values["n_heads"],
            kv_heads=values["n_kv_heads"],
            mlp_width=values["d_ff"],
            vocab=values["vocab_size"],
            rope_theta=float(values["rope_theta"]),
            residual=residual_of(values),
        )
    )


def _theirs(config: Config) -> dict[str, Any]:
    """Our config as theirs: the keys that `from_depthbench` reads."""
    shape, residual = config.shape, config.residual
    return {
        **_arch(residual),
        "n_layers": shape.layers,
        "d_model": shape.width,
        "n_heads": shape.heads,
        "n_kv_heads": shape.kv_heads,
        "d_ff": shape.mlp_width,
        "vocab_size": config.model.vocab,
        "rope_theta": config.model.rope_theta,
        "norm_eps": residual.eps,
    }


def _arch(residual: Residual) -> dict[str, Any]:
    """The part of their config that names the residual connection: `residual_of` backwards."""
    if type(residual) not in _ARCHES:
        raise InputError(
            f"model.residual is {residual.name!r}, which DepthBench has no name for: "
            "choose another format with --to"
        )
    values: dict[str, Any] = {"arch": _ARCHES[type(residual)]}
    if isinstance(residual, LNS) and residual.constant:
        values["arch"] = "lns_depth"
    if isinstance(residual, FullAttnRes | BlockAttnRes):
        ablations = {name: getattr(residual, name, None) for name in _ABLATIONS}
        values |= {
            "attnres_block_size": residual.block,
            "attnres_norm_eps": residual.mix_eps,
            "experimental": {name: value for name, value in ablations.items() if value} or None,
        }
    if isinstance(residual, DepthMuP):
        values["residual_scaling_base_depth"] = residual.base_layers
    if isinstance(residual, HC | MHC | MHCNative | MHCStatic):
        connector = {
            theirs: getattr(residual, ours)
            for ours, theirs in _CONNECTOR.items()
            if hasattr(residual, ours)
        }
        values |= {"n_streams": residual.streams, "hyper_connections": connector}
    return values


def _claims(name: str) -> bool:
    """Whether a name belongs to a state dict: others, such as gradients in a fixture, are ignored,
    and so are the branches that HC's state dicts list a second time."""
    prefixes = ("blocks.", "embeddings.", "lm_head.", "res_", "final_")
    return name.startswith(prefixes) and "_connection.branch." not in name


DEPTHBENCH = Format("depthbench", "arch", _ours, _theirs, tensor_map, _claims)


def from_depthbench(tensors: Tensors, config: Values, *, dtype: Any = jnp.float32) -> Transformer:
    """The authors' checkpoint as a model; `model(input_ids)` returns float32 logits [B, T, V].

    tensors: their state-dict names -> arrays; names outside a state dict are ignored. config: arch,
    n_layers, d_model, n_heads, n_kv_heads, d_ff, vocab_size, rope_theta, norm_eps, and what the
    architecture needs besides. Raises InputError that names the key which is missing, or lists the
    tensors which are missing, left over or of another shape.
    """
    ours = read_config(DEPTHBENCH, config)
    model = dataclasses.replace(ours.model, dtype=jnp.dtype(dtype).name)
    ours = dataclasses.replace(ours, model=model)
    return fill(ours, tensor_map(ours.shape, ours.residual), tensors, _claims)


def to_depthbench(model: Transformer) -> dict[str, np.ndarray]:
    """The parameters under the authors' names and layouts: the inverse of `from_depthbench`."""
    return named(model, tensor_map(model.shape, model.residual.rule))
