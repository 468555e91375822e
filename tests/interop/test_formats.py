"""Each format: out and in is exact, what does not fit is listed, and the function is theirs."""

import json
import pathlib

import numpy as np
import pytest
from small_models import assert_same, random_model, replaced, small_config

from depthjax.errors import InputError
from depthjax.interop import (
    FORMATS,
    config_beside,
    export,
    format_of,
    load,
    read_json,
    read_tensors,
    write_checkpoint,
)
from depthjax.interop.depthbench import DEPTHBENCH, residual_of
from depthjax.interop.folder import read_folder
from depthjax.interop.llama import KIMI_K3, LLAMA
from depthjax.interop.tensors import fill, read_config
from depthjax.residuals import HC, REGISTRY, BlockAttnRes, FullAttnRes, PreLN

PARITY = pathlib.Path(__file__).parent.parent / "parity" / "models"
CASES = [
    *(("depthjax", make()) for make in REGISTRY.values()),
    *(("depthbench", make()) for name, make in REGISTRY.items() if name != "mhc_lite"),
    ("depthbench", FullAttnRes(logit_scale=True)),
    ("llama", PreLN(eps=1e-5)),
    ("kimi_k3", FullAttnRes(mix_eps=1e-5)),
    ("kimi_k3", BlockAttnRes.of_layers(2)),
]
IDS = [f"{name}-{residual.name}" for name, residual in CASES]


def written(tmp_path, name, config, model, out="out"):
    """The path of a checkpoint of `model` in the format called `name`."""
    path = tmp_path / out
    write_checkpoint(path, *export(FORMATS[name], config, model))
    return path


@pytest.mark.parametrize("out", ["folder", "file.safetensors"])
@pytest.mark.parametrize(("name", "residual"), CASES, ids=IDS)
def test_out_and_in_is_exact(tmp_path, name, residual, out):
    config = small_config(residual, rope_theta=5000.0)
    model = random_model(config)
    path = written(tmp_path, name, config, model, out)
    values = read_json(config_beside(path))
    assert format_of(values).name == name
    back, same = load(FORMATS[name], read_tensors(path), values)
    assert_same(model, same)
    assert (back.shape, back.residual) == (config.shape, config.residual)
    assert back.model.rope_theta == 5000.0


@pytest.mark.parametrize(("name", "residual"), CASES[-4:], ids=IDS[-4:])
def test_bf16_survives(tmp_path, name, residual):
    config = small_config(residual, dtype="bfloat16")
    model = random_model(config)
    path = written(tmp_path, name, config, model)
    back, same = load(FORMATS[name], read_tensors(path), read_json(config_beside(path)))
    assert back.model.param_dtype == back.model.dtype == "bfloat16"
    assert_same(model, same)


def test_a_checkpoint_that_is_bf16_in_part_becomes_fp32():
    config = small_config()
    tensors, values = export(LLAMA, config, random_model(config))
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype("bfloat16")
    assert load(LLAMA, tensors, values)[0].model.param_dtype == "float32"


@pytest.mark.parametrize("case", sorted(p.stem for p in PARITY.glob("*.json")))
def test_depthbench_config_comes_back(case):
    config = json.loads((PARITY / f"{case}.json").read_text())
    ours = read_config(DEPTHBENCH, config)
    sizes = (ours.shape.kv_heads, ours.shape.head_dim)
    assert residual_of(DEPTHBENCH.theirs(ours)).bind(6, sizes) == ours.residual


@pytest.mark.parametrize("name", FORMATS)
def test_faults_are_listed_by_name_and_shape(name):
    config = small_config(FullAttnRes() if name == "kimi_k3" else None)
    format = FORMATS[name]
    tensors, values = export(format, config, random_model(config))
    wanted = format.tensors(config.shape, config.residual)
    head, norm, gate = (
        wanted[path].names(3)[-1] for path in ("head", "residual/final/norm", "mlp/gate")
    )
    extra = "blocks.0.extra.weight"
    shape = tensors[norm].shape
    del tensors[norm]
    tensors[head] = tensors[head][:, :-1]
    tensors[gate] = tensors[gate].astype(np.int8)
    tensors[extra] = np.zeros((3, 2))
    with pytest.raises(InputError) as error:
        load(format, tensors, values)
    message = str(error.value)
    assert f"{norm} is missing, of shape {shape}" in message
    right = (*tensors[head].shape[:1], tensors[head].shape[1] + 1)
    assert f"{head} has shape {tensors[head].shape}, not {right}" in message
    assert f"{gate} holds int8, not floats" in message
    assert f"{extra} with shape (3, 2) is not part of it" in message
    assert message.count(";") == 3


@pytest.mark.parametrize(
    ("name", "residual", "words"),
    [
        ("llama", HC(), ["model.residual", "hc", "llama"]),
        ("llama", FullAttnRes(), ["full_attnres", "llama"]),
        ("kimi_k3", PreLN(), ["pre_ln", "Kimi K3"]),
        ("kimi_k3", BlockAttnRes(block_size_sublayers=3), ["block_size_sublayers is 3", "even"]),
    ],
)
def test_what_a_format_cannot_say_is_refused(name, residual, words):
    config = small_config(residual)
    with pytest.raises(InputError) as error:
        export(FORMATS[name], config, random_model(config))
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *(("depthbench", k) for k in ("n_layers", "arch", "norm_eps", "attnres_block_size")),
        *(("kimi_k3", k) for k in ("attn_res_block_size", "hidden_size", "vocab_size")),
    ],
)
def test_missing_key_of_a_config(name, key):
    config = small_config(BlockAttnRes(block_size_sublayers=2))
    tensors, values = export(FORMATS[name], config, random_model(config))
    del values[key]
    with pytest.raises(InputError, match=f"no '{key}', which a {name} config needs: add it"):
        load(FORMATS[name], tensors, values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["rope_scaling", "llama3"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling", "linear"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ["yarn"]),
        ({"attention_bias": True}, ["attention_bias is True", "False"]),
        ({"mlp_bias": True}, ["mlp_bias is True", "False"]),
        ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "silu"]),
        ({"head_dim": 8}, ["head_dim is 8", "4"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config", "None"]),
        ({"architectures": ["MistralForCausalLM"]}, ["Mistral", "LlamaForCausalLM"]),
        ({"model_type": "qwen2"}, ["model_type is 'qwen2'", "llama"]),
        ({"num_hidden_layers": "three"}, ["num_hidden_layers is 'three': give a positive integer"]),
        ({"hidden_size": "wide"}, ["in the llama config, hidden_size is 'wide'"]),
        ({"num_attention_heads": 0}, ["num_attention_heads is 0: give a positive integer"]),
        ({"num_attention_heads": 32}, ["head_dim is 4", "hidden_size 16"]),
        ({"num_attention_heads": True}, ["num_attention_heads is True: give a positive"]),
        ({"num_key_value_heads": 3}, ["in the llama config", "3"]),
        ({"max_position_embeddings": None}, ["max_position_embeddings is None: give a positive"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps is -1: give a finite positive number or 0"]),
        ({"rope_theta": None}, ["rope_theta is None: give a finite positive"]),
        ({"rope_theta": float("inf")}, ["rope_theta is inf: give a finite positive"]),
        ({"rope_theta": 10**400}, ["rope_theta is 1", "finite"]),
        ({"rope_scaling": "llama3"}, ["rope_scaling is 'llama3': give an object"]),
        ({"rope_parameters": {"rope_theta": "x"}}, ["rope_parameters.rope_theta is 'x': give a"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_other_llamas_are_refused(change, words):
    config = small_config()
    tensors, values = export(LLAMA, config, random_model(config))
    values |= change
    with pytest.raises(InputError) as error:
        load(LLAMA, tensors, values)
    assert all(word in str(error.value) for word in words), error.value


def rms(x, weight, eps):
    return weight * x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)


def llama_branches(weights, config, layer):
    """(attention, mlp) of the Hugging Face convention as functions of the normalised input."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size = config["hidden_size"] // heads

    def linear(name, x):
        return x @ weights[f"model.layers.{layer}.{name}.weight"].T

    def rotate(x):  # [B, H, T, E]
        frequency = config["rope_theta"] ** -(np.arange(0, size, 2) / size)
        angle = np.outer(np.arange(x.shape[2]), frequency)
        angle = np.concatenate([angle, angle], -1)
        half = np.concatenate([-x[..., size // 2 :], x[..., : size // 2]], -1)
        return x * np.cos(angle) + half * np.sin(angle)

    def attention(x):
        batch, length, _ = x.shape

        def split(name, count):
            return linear(name, x).reshape(batch, length, count, size).transpose(0, 2, 1, 3)

        query, key = (
            rotate(split("self_attn.q_proj", heads)),
            rotate(split("self_attn.k_proj", groups)),
        )
        key, value = (
            np.repeat(y, heads // groups, axis=1) for y in (key, split("self_attn.v_proj", groups))
        )
        logits = query @ key.swapaxes(2, 3) / np.sqrt(size)
        logits = np.where(np.tril(np.ones((length, length), bool)), logits, -np.inf)
        weight = np.exp(logits - logits.max(-1, keepdims=True))
        mixed = weight / weight.sum(-1, keepdims=True) @ value
        mixed = mixed.transpose(0, 2, 1, 3).reshape(batch, length, -1)
        return linear("self_attn.o_proj", mixed)

    def mlp(x):
        gate = linear("mlp.gate_proj", x)
        return linear("mlp.down_proj", gate / (1 + np.exp(-gate)) * linear("mlp.up_proj", x))

    return attention, mlp


def llama_logits(weights, config, ids):
    """What a LlamaForCausalLM computes, in fp64."""
    weights = {name: np.asarray(w, np.float64) for name, w in weights.items()}
    eps, h = config["rms_norm_eps"], weights["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        attention, mlp = llama_branches(weights, config, layer)
        norms = f"model.layers.{layer}."
        h = h + attention(rms(h, weights[norms + "input_layernorm.weight"], eps))
        h = h + mlp(rms(h, weights[norms + "post_attention_layernorm.weight"], eps))
    return rms(h, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T


def kimi_logits(weights, config, ids):
    """Kimi K3's mixing over depth around Llama's branches, in fp64: finished blocks and one open
    sum, which becomes a block at every layer that the block size divides."""
    weights = {name: np.asarray(w, np.float64) for name, w in weights.items()}
    eps = config["rms_norm_eps"]

    def mix(blocks, total, name):
        sources = np.stack([*blocks, total])
        keys = rms(sources, weights[f"model.{name}_norm.weight"], eps)
        logits = keys @ weights[f"model.{name}_proj.weight"][0]
        weight = np.exp(logits - logits.max(0))
        return ((weight / weight.sum(0))[..., None] * sources).sum(0)

    total, blocks = weights["model.embed_tokens.weight"][ids], []
    for layer in range(config["num_hidden_layers"]):
        attention, mlp = llama_branches(weights, config, layer)
        place = f"layers.{layer}."
        x = mix(blocks, total, place + "self_attention_res") if blocks else total
        if layer % config["attn_res_block_size"] == 0:
            blocks, total = [*blocks, total], 0
        total = total + attention(rms(x, weights[f"model.{place}input_layernorm.weight"], eps))
        x = mix(blocks, total, place + "mlp_res")
        norm = weights[f"model.{place}post_attention_layernorm.weight"]
        total = total + mlp(rms(x, norm, eps))
    h = mix(blocks, total, "output_attn_res")
    return rms(h, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T


IDS_IN = np.random.default_rng(1).integers(31, size=(2, 12), dtype=np.int32)


@pytest.mark.jax_version
def test_llama_computes_what_theirs_does():
    config = small_config(PreLN(eps=1e-5), rope_theta=500.0)
    model = random_model(config)
    tensors, values = export(LLAMA, config, model)
    np.testing.assert_allclose(model(IDS_IN), llama_logits(tensors, values, IDS_IN), atol=1e-4)


@pytest.mark.jax_version
@pytest.mark.parametrize("layers", [1, 2])
def test_kimi_k3_computes_what_theirs_does(layers):
    config = small_config(BlockAttnRes.of_layers(layers, eps=1e-5, mix_eps=1e-5))
    model = random_model(config)
    tensors, values = export(KIMI_K3, config, model)
    np.testing.assert_allclose(model(IDS_IN), kimi_logits(tensors, values, IDS_IN), atol=1e-4)


def test_kimi_k3_has_its_unread_tensors_and_needs_none():
    config = small_config(BlockAttnRes.of_layers(1))
    model = random_model(config)
    tensors, values = export(KIMI_K3, config, model)
    unread = [f"model.layers.0.self_attention_res_{name}.weight" for name in ("norm", "proj")]
    assert [tensors.pop(name).shape for name in unread] == [(16,), (1, 16)]
    assert_same(model, load(KIMI_K3, tensors, values)[1])
    assert "attn_res_norm_eps" not in values


def test_tied_head_is_the_embedding():
    config = small_config()
    model = random_model(config)
    tensors, values = export(LLAMA, config, model)
    del tensors["lm_head.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2)
    with pytest.raises(InputError, match=r"lm_head\.weight is missing"):
        load(LLAMA, tensors, values)
    _, tied = load(LLAMA, tensors, values | {"tie_word_embeddings": True})
    np.testing.assert_array_equal(tied.head[...], model.embedding[...].T)


def test_sharded_folder(tmp_path):
    config = small_config()
    model = random_model(config)
    tensors, values = export(LLAMA, config, model)
    folder = tmp_path / "sharded"
    names, places = sorted(tensors), {}
    for i, part in enumerate((names[:9], names[9:]), 1):
        shard = f"model-{i:05}-of-00002.safetensors"
        write_checkpoint(folder / shard, {name: tensors[name] for name in part}, {})
        places |= dict.fromkeys(part, shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert_same(model, load(LLAMA, read_tensors(folder), values)[1])
    (folder / shard).unlink()
    with pytest.raises(InputError, match=f"names {shard}, which is not there"):
        read_tensors(folder)


def test_model_folder_without_vocabulary(tmp_path):
    config = small_config()
    path = written(tmp_path, "depthjax", config, random_model(config))
    values = read_json(path / "config.json")
    values["model"]["vocab"] = None
    (path / "config.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"no 'model\.vocab', which a depthjax config needs"):
        read_folder(path)


def test_folder_of_another_shape_is_refused(tmp_path):
    config = small_config()
    path = written(tmp_path, "depthjax", config, random_model(config))
    other = replaced(config, layers=4)
    wanted = FORMATS["depthjax"].tensors(other.shape, other.residual)
    with pytest.raises(InputError, match=r"attention/query has shape \(3, 16, 4, 4\), not \(4,"):
        fill(other, wanted, read_tensors(path))
