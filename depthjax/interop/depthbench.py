"""Checkpoints of the DepthBench authors, in and out: their tensor names and layouts.

Their Linear weights are [out, in]; ours are [in, out], with heads as an axis of their own.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection
from typing import Any

import jax.numpy as jnp
import numpy as np

from depthjax.config import Config, ModelConfig
from depthjax.errors import InputError
from depthjax.interop.keys import choice, epsilon, flag, number, section, whole, wrong
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
_ARCHES: dict[str, type[Residual]] = {
    "preln": PreLN,
    "postln": PostLN,
    "sandwich": SandwichLN,
    "lns": LNS,
    "lns_depth": LNS,
    "deepnorm": DeepNorm,
    "keel": Keel,
    "moda_pre": MoDA,
    "moda_post": PostLNMoDA,
    "hc": HC,
    "mhc_liger": MHC,
    "mhc_native": MHCNative,
    "mhc_static": MHCStatic,
    "attnres_full": FullAttnRes,
    "attnres_block": BlockAttnRes,
    "depth_mup": DepthMuP,
    "completep": CompleteP,
}
_FIXED = {"lns": {"constant": False}, "lns_depth": {"constant": True}}  # what an arch says besides
_EXPERIMENTS = {f"attnres_{name}": name for name in ("logit_scale", "topk", "bias")}
"""Names of Full Attention Residuals with an experiment; that of topk goes on with digits."""
_SECTIONS = ("hyper_connections", "experimental")


def _fraction(values: Values, name: str) -> float | None:
    return None if values.get(name) is None else number(values, name)


_KEYS: dict[str, tuple[str, Callable[[Values, str], Any]]] = {
    "eps": ("norm_eps", epsilon),
    "mix_eps": ("attnres_norm_eps", epsilon),
    "block_size_sublayers": ("attnres_block_size", whole),
    "base_layers": ("residual_scaling_base_depth", whole),
    "streams": ("n_streams", whole),
    "sinkhorn_rounds": ("hyper_connections.sinkhorn_iters", whole),
    "sinkhorn_tau": ("hyper_connections.sinkhorn_tau", number),
    "sinkhorn_delta": ("hyper_connections.liger_sinkhorn_eps", epsilon),
    "stream_eps": ("hyper_connections.liger_rms_eps", epsilon),
    "logit_scale": ("experimental.logit_scale", functools.partial(flag, default=False)),
    "topk": ("experimental.topk", _fraction),
    "bias": ("experimental.bias", functools.partial(flag, default=False)),
}
"""A field of a residual connection -> its key in their config (in a section: "section.key"), and
how that is read."""
_BESIDE = ("input_ids", "logits", "loss")
_BESIDE_PREFIXES = (
    *("grad.", "hidden.", "analysis.", "rederived."),
    *("attnres.", "hc.", "depth_state.", "readout."),
)
"""What a file with their numbers holds besides the state dict."""


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


def residual_of(config: Values) -> Residual:
    """The residual connection that their config (the dict of a parity JSON file) names."""
    arch = config["arch"]
    if isinstance(arch, str):
        arch = re.sub(r"(?<=^attnres_topk)\d+$", "", arch)
    arch = choice({"arch": arch}, "arch", [*_ARCHES, *_EXPERIMENTS])
    kind, experiment = _ARCHES.get(arch, FullAttnRes), _EXPERIMENTS.get(arch)
    flat = dict(config)
    for name in _SECTIONS:
        flat |= section(config, name)
    fields = {field.name for field in dataclasses.fields(kind)}
    keys = {name: key for name, key in _KEYS.items() if name in fields}
    _check_experiments(flat, {key for key, _ in keys.values()}, arch)
    if kind is FullAttnRes and config.get("attnres_block_size", 1) not in (1, None):
        size = config["attnres_block_size"]
        raise wrong("attnres_block_size", size, f"give 1 with arch {arch}, or arch attnres_block")
    options = {name: read(flat, key) for name, (key, read) in keys.items()}
    if experiment and not options[experiment]:
        key, value = f"experimental.{experiment}", options[experiment]
        raise wrong(key, value, f"arch {arch} needs it, so set it or give arch attnres_full")
    return kind(**options, **_FIXED.get(arch, {}))


def _check_experiments(flat: Values, known: Collection[str], arch: str) -> None:
    """Raises InputError for an experiment that is not known, or not to this arch."""
    possible = [key for key, _ in _KEYS.values() if key.startswith("experimental.")]
    for key, value in flat.items():
        if not key.startswith("experimental."):
            continue
        if key not in possible:
            names = ", ".join(name.partition(".")[2] for name in possible)
            raise wrong(key, value, f"the keys of experimental can only be {names}")
        if value and key not in known:
            raise wrong(key, value, f"leave it out, arch {arch} has no such experiment")


def _ours(values: Values) -> Config:
    """Their config as ours."""
    return Config(
        model=ModelConfig(
            shape="custom",
            layers=whole(values, "n_layers"),
            width=whole(values, "d_model"),
            heads=whole(values, "n_heads"),
            kv_heads=whole(values, "n_kv_heads"),
            mlp_width=whole(values, "d_ff"),
            vocab=whole(values, "vocab_size"),
            rope_theta=number(values, "rope_theta"),
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
    }


def _arch(residual: Residual) -> dict[str, Any]:
    """The part of their config that says the residual connection: `residual_of` backwards."""
    for arch, kind in _ARCHES.items():
        fixed = _FIXED.get(arch, {})
        if type(residual) is kind and all(getattr(residual, n) == v for n, v in fixed.items()):
            break
    else:
        raise InputError(
            f"model.residual is {residual.name!r}, which DepthBench has no name for: "
            "choose another format with --to"
        )
    values: dict[str, Any] = {"arch": arch}
    if kind is FullAttnRes:
        values["attnres_block_size"] = residual.block
    for field in dataclasses.fields(residual):
        key, _ = _KEYS.get(field.name, (None, None))
        value = getattr(residual, field.name)
        if key is None or (key.startswith("experimental.") and not value):
            continue
        of, _, inner = key.rpartition(".")
        (values.setdefault(of, {}) if of else values)[inner] = value
    return values


def _claims(name: str) -> bool:
    """Whether a name has to belong to the model: not the numbers of a fixture, and not the branches
    that HC's state dicts list a second time."""
    beside = name in _BESIDE or name.startswith(_BESIDE_PREFIXES)
    return not beside and "_connection.branch." not in name


DEPTHBENCH = Format("depthbench", "arch", _ours, _theirs, tensor_map, _claims)


def from_depthbench(tensors: Tensors, config: Values, *, dtype: Any = jnp.float32) -> Transformer:
    """The authors' checkpoint as a model; `model(input_ids)` returns float32 logits [B, T, V].

    tensors: their state-dict names -> arrays; numbers of a fixture beside them are ignored. config:
    arch, n_layers, d_model, n_heads, n_kv_heads, d_ff, vocab_size, rope_theta, norm_eps, and what
    the architecture needs besides. Raises InputError that names the key which is missing, or lists
    the tensors which are missing, left over or of another shape.
    """
    ours = read_config(DEPTHBENCH, config)
    model = dataclasses.replace(ours.model, dtype=jnp.dtype(dtype).name)
    ours = dataclasses.replace(ours, model=model)
    return fill(ours, tensor_map(ours.shape, ours.residual), tensors, _claims)


def to_depthbench(model: Transformer) -> dict[str, np.ndarray]:
    """The parameters under the authors' names and layouts: the inverse of `from_depthbench`."""
    return named(model, tensor_map(model.shape, model.residual.rule))
