"""Llama checkpoints of the Hugging Face hub, and Kimi K3's names for Attention Residuals on top.

A Llama has the plain stream; its Linear weights are [out, in], and its rotary positions pair x_j
with x_{j + E/2} as ours do. Kimi K3 adds two tensors a reader, a norm weight and a [1, D]
projection, and counts its block size in transformer layers; the backbone stays Llama's here, so the
config says `llama_attn_res`, which no loader mistakes for a Llama without them.
"""

from typing import Any

import numpy as np

from depthjax.config import Config, ModelConfig
from depthjax.errors import InputError
from depthjax.interop.keys import epsilon, number, section, whole, wrong
from depthjax.interop.tensors import BRANCHES, Format, Tensor, Tensors, Values, linear
from depthjax.models import Shape
from depthjax.residuals import BlockAttnRes, FullAttnRes, PreLN, Residual

_LAYER = "model.layers.{}."
_NAMES = {
    "embedding": "model.embed_tokens",
    "head": "lm_head",
    "attention/query": _LAYER + "self_attn.q_proj",
    "attention/key": _LAYER + "self_attn.k_proj",
    "attention/value": _LAYER + "self_attn.v_proj",
    "attention/out": _LAYER + "self_attn.o_proj",
    "mlp/gate": _LAYER + "mlp.gate_proj",
    "mlp/up": _LAYER + "mlp.up_proj",
    "mlp/down": _LAYER + "mlp.down_proj",
    "residual/attention/norm": _LAYER + "input_layernorm",
    "residual/mlp/norm": _LAYER + "post_attention_layernorm",
    "residual/final/norm": "model.norm",
    "residual/attention/query": _LAYER + "self_attention_res_proj",
    "residual/attention/key_scale": _LAYER + "self_attention_res_norm",
    "residual/mlp/query": _LAYER + "mlp_res_proj",
    "residual/mlp/key_scale": _LAYER + "mlp_res_norm",
    "residual/final/query": "model.output_attn_res_proj",
    "residual/final/key_scale": "model.output_attn_res_norm",
}
_PLAIN, _MIXED = "llama", "llama_attn_res"
_ARCHITECTURES = {_PLAIN: "LlamaForCausalLM", _MIXED: "LlamaAttnResForCausalLM"}
_BLOCK = "attn_res_block_size"
_FULL = "full"  # a block of one sublayer is no number of layers
_ONLY = {  # what a Llama may say and depthjax has no other value for
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
}
_LONGEST = 2048  # tokens of context that a config is given at most: its default for training


def _tensors(shape: Shape, residual: Residual) -> dict[str, Tensor]:
    """Our parameter path -> their tensor."""

    def tensor(path: str, *layouts, **rows) -> Tensor:
        return Tensor(f"{_NAMES[path]}.weight", *layouts, **rows)

    tensors = {"embedding": tensor("embedding")}
    tensors["head"] = tensor("head", np.transpose, np.transpose)
    tensors |= {path: tensor(path, *linear(path, shape.head_dim)) for path in BRANCHES}
    for kind, declared in residual.parameters(shape.layers, shape.width).items():
        for name, parameter in declared.items():
            row = (np.ravel, lambda w: w[None]) if name == "query" else ()  # [D] <-> [1, D]
            path = f"residual/{kind}/{name}"
            tensors[path] = tensor(path, *row, first_layer=parameter.first_layer)
    return tensors


def _rope_theta(values: Values) -> float:
    """The base of the rotary frequencies, in the older or the newer spelling; only unscaled."""
    name = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    rope = section(values, name)
    kind = rope.get(f"{name}.rope_type", rope.get(f"{name}.type", "default"))
    if kind != "default":
        raise wrong(
            name, kind, "depthjax has unscaled rotary positions, so give a checkpoint without it"
        )
    inner = f"{name}.rope_theta"
    return number(rope, inner) if inner in rope else number(values, "rope_theta", 10_000.0)


def _shared(values: Values, kind: str, residual: Residual) -> Config:
    """Their config as ours; InputError for what would be another network here."""
    if values.get("model_type", kind) != kind:
        raise wrong("model_type", values["model_type"], f"give a checkpoint of {kind}")
    wanted = _ARCHITECTURES[kind]
    if values.get("architectures") not in (None, [wanted]):
        raise wrong("architectures", values["architectures"], f"give one of [{wanted!r}]")
    theta = _rope_theta(values)
    for name, right in (_ONLY | {"quantization_config": None}).items():
        if name != "rope_scaling" and values.get(name, right) not in (right, None):
            raise wrong(name, values[name], f"depthjax can only take {right!r}")
    given = {name: value for name, value in values.items() if value is not None}
    width, heads = whole(values, "hidden_size"), whole(values, "num_attention_heads")
    size = whole(given, "head_dim", max(1, width // heads))
    if size * heads != width:
        raise InputError(
            f"head_dim is {size}, but hidden_size {width} over num_attention_heads {heads} gives "
            f"{width / heads:g}: depthjax can only take that"
        )
    return Config(
        model=ModelConfig(
            shape="custom",
            layers=whole(values, "num_hidden_layers"),
            width=width,
            heads=heads,
            kv_heads=whole(given, "num_key_value_heads", heads),
            mlp_width=whole(values, "intermediate_size"),
            vocab=whole(values, "vocab_size"),
            context=min(whole(values, "max_position_embeddings", _LONGEST), _LONGEST),
            rope_theta=theta,
            residual=residual,
        )
    )


def _eps(values: Values) -> float:
    return epsilon(values, "rms_norm_eps", 1e-6)


def _llama_ours(values: Values) -> Config:
    return _shared(values, _PLAIN, PreLN(eps=_eps(values)))


def _llama_theirs(config: Config, kind: str = _PLAIN) -> dict[str, Any]:
    shape, model = config.shape, config.model
    return {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_size": shape.width,
        "intermediate_size": shape.mlp_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.context,
        "rope_theta": model.rope_theta,
        "rms_norm_eps": config.residual.eps,
        "initializer_range": model.init_std,
        "tie_word_embeddings": False,
        "torch_dtype": model.param_dtype,
        **_ONLY,
    }


def _kimi_ours(values: Values) -> Config:
    size, eps = values[_BLOCK], _eps(values)
    mix = {"eps": eps, "mix_eps": epsilon(values, "attn_res_norm_eps", eps)}
    if size == _FULL:
        return _shared(values, _MIXED, FullAttnRes(**mix))
    if type(size) is not int or size < 1:
        raise wrong(_BLOCK, size, f"give a number of layers or {_FULL!r}")
    return _shared(values, _MIXED, BlockAttnRes.of_layers(size, **mix))


def _kimi_theirs(config: Config) -> dict[str, Any]:
    """Adds the block size, and the epsilon of the mixtures where it is another one (Kimi K3 itself
    has one for all its norms)."""
    residual = config.residual
    if not isinstance(residual, FullAttnRes | BlockAttnRes):
        raise InputError(
            f"model.residual is {residual.name!r}, which Kimi K3 has no tensors for: choose "
            "another format with --to, or an Attention Residual with --to-residual"
        )
    size: Any = _FULL
    if isinstance(residual, BlockAttnRes):
        size, odd = divmod(residual.block, 2)
        if odd:
            raise InputError(
                f"model.residual.block_size_sublayers is {residual.block}, which is no number of "
                "transformer layers, as Kimi K3 counts: only an even one can be written"
            )
    values = _llama_theirs(config, _MIXED) | {_BLOCK: size}
    if residual.mix_eps != residual.eps:
        values["attn_res_norm_eps"] = residual.mix_eps
    return values


def _arrange(tensors: Tensors, values: Values) -> dict[str, np.ndarray]:
    """Without the rotary frequencies that older files hold; a tied head is the embedding."""
    arranged = {n: t for n, t in tensors.items() if not n.endswith("rotary_emb.inv_freq")}
    embedding = _NAMES["embedding"] + ".weight"
    if values.get("tie_word_embeddings") and embedding in arranged:
        arranged[_NAMES["head"] + ".weight"] = arranged[embedding]
    return arranged


def _unread() -> tuple[str, str]:
    """Kimi K3's (projection, norm) in front of the first attention, which has nothing to mix."""
    names = (_NAMES[f"residual/attention/{name}"] + ".weight" for name in ("query", "key_scale"))
    proj, norm = (name.format(0) for name in names)
    return proj, norm


def _kimi_arrange(tensors: Tensors, values: Values) -> dict[str, np.ndarray]:
    arranged = _arrange(tensors, values)
    return {name: tensor for name, tensor in arranged.items() if name not in _unread()}


def _kimi_complete(tensors: Tensors) -> dict[str, np.ndarray]:
    """Adds the tensors that nothing reads, since their loaders want to find them."""
    proj, norm = _unread()
    some = tensors[_NAMES["residual/mlp/query"].format(0) + ".weight"]
    scale = tensors[_NAMES["residual/mlp/key_scale"].format(0) + ".weight"]
    return {**tensors, proj: np.zeros_like(some), norm: np.ones_like(scale)}


LLAMA = Format("llama", "model_type", _llama_ours, _llama_theirs, _tensors, arrange=_arrange)
KIMI_K3 = Format(
    "kimi_k3",
    _BLOCK,
    _kimi_ours,
    _kimi_theirs,
    _tensors,
    arrange=_kimi_arrange,
    complete=_kimi_complete,
)
