"""GGUF files of the LLaMA architecture, as llama.cpp writes them: read as a Llama of the hub.

A file holds key-value metadata, then the tensors' names, sizes (the fastest axis first), types and
places, then their data. Blocks of 32 weights share a scale: with x the fp16 scale, m the fp16
minimum, q the integers,

    Q8_0   w = x q            q int8
    Q4_1   w = x q + m        q 4 bits, the low halves of 16 bytes first, then the high ones

Rows of the query and key matrices are stored so that rotary positions pair neighbours, 2 j with
2 j + 1; a Llama of the hub, and ours, pair j with j + E/2.
"""

import json
import pathlib
import struct
from typing import Any

import ml_dtypes
import numpy as np

from depthjax.errors import InputError
from depthjax.interop.tensors import Tensors

SUFFIX = ".gguf"
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_BLOCK = 32
_PLAIN = {0: np.dtype("<f4"), 1: np.dtype("<f2"), 30: np.dtype(ml_dtypes.bfloat16)}
_BLOCKS = {
    3: np.dtype([("scale", "<f2"), ("least", "<f2"), ("halves", "u1", 16)]),  # Q4_1
    8: np.dtype([("scale", "<f2"), ("whole", "i1", _BLOCK)]),  # Q8_0
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_SPLITS = {  # how text is cut before merges, by `tokenizer.ggml.pre`
    "gpt-2": [],
    "smollm": [{"type": "Digits", "individual_digits": True}],
}
_CONTROL = 3  # type of a token that text does not spell


def read_gguf(path: str | pathlib.Path) -> tuple[dict[str, Any], Tensors, str | None]:
    """(config, tensors, tokenizer) of a GGUF file: the first two under the names of a Llama of the
    hub, in fp32 unless they are bf16; the tokenizer as JSON for `tokenizers`, None where it is of a
    kind that depthjax does not know.

    Raises InputError for a file that is no GGUF, is cut short, or holds another architecture or
    another quantization.
    """
    try:
        metadata, tensors = _read(pathlib.Path(path))
        architecture = metadata.get("general.architecture")
        if architecture != "llama":
            raise InputError(
                f"{path} holds the architecture {architecture!r}: depthjax can only take 'llama'"
            )
        values = _config(metadata, tensors)
        heads = values["num_attention_heads"], values["num_key_value_heads"]
        named = {}
        for name, tensor in tensors.items():
            for part, count in zip(("attn_q", "attn_k"), heads, strict=True):
                if name.endswith(f".{part}.weight"):
                    tensor = _half_split(tensor, count)
            named[_hub_name(name)] = tensor
    except KeyError as error:
        raise InputError(f"{path} has no {error.args[0]!r}: get the file again") from error
    except (struct.error, ValueError, IndexError, TypeError, ArithmeticError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} cannot be read as GGUF ({error}): get it again") from error
    return values, named, _tokenizer(metadata)


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: np.memmap):
        self.data, self.place = data, 0

    def take(self, size: int) -> bytes:
        if self.place + size > len(self.data):
            raise ValueError("it ends early")
        self.place += size
        return self.data[self.place - size : self.place].tobytes()

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            kind, count = self.scalar("I"), self.scalar("Q")
            return [self.value(kind) for _ in range(count)]
        return self.scalar(_SCALARS[kind])


def _read(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    cursor = _Cursor(np.memmap(path, np.uint8, mode="r"))
    if cursor.take(4) != _MAGIC or cursor.scalar("I") not in _VERSIONS:
        raise ValueError("it does not begin as version 2 or 3 does")
    tensors, entries = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(entries):
        name = cursor.text()
        metadata[name] = cursor.value(cursor.scalar("I"))
    places = []
    for _ in range(tensors):
        name, axes = cursor.text(), cursor.scalar("I")
        shape = tuple(cursor.scalar("Q") for _ in range(axes))[::-1]
        places.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.place // alignment) * alignment
    data = cursor.data[start:]
    return metadata, {
        name: _tensor(data[offset:], shape, kind, name) for name, shape, kind, offset in places
    }


def _tensor(data: np.ndarray, shape: tuple[int, ...], kind: int, name: str) -> np.ndarray:
    """The tensor at the start of `data`; a view where it is fp32 or bf16."""
    count = int(np.prod(shape, dtype=np.int64))
    if kind in _PLAIN:
        found = data[: count * _PLAIN[kind].itemsize].view(_PLAIN[kind]).reshape(shape)
        return found.astype(np.float32) if found.dtype == np.float16 else found
    if kind not in _BLOCKS:
        raise InputError(
            f"{name} has the GGUF type {kind}: depthjax reads F32, F16, BF16, Q8_0 and Q4_1"
        )
    layout, blocks = _BLOCKS[kind], count // _BLOCK
    found = data[: blocks * layout.itemsize].view(layout)
    scale = found["scale"].astype(np.float32)[:, None]
    if "whole" in layout.names:
        return (scale * found["whole"]).astype(np.float32).reshape(shape)
    halves = found["halves"]
    quanta = np.concatenate([halves & 15, halves >> 4], axis=1).astype(np.float32)
    return (scale * quanta + found["least"].astype(np.float32)[:, None]).reshape(shape)


def _config(metadata: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """The metadata as the config.json of a Llama."""
    heads = metadata["llama.attention.head_count"]
    width = metadata["llama.embedding_length"]
    values = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": metadata.get("llama.attention.key_length", width // heads),
        "vocab_size": int(tensors["token_embd.weight"].shape[0]),
        "max_position_embeddings": metadata["llama.context_length"],
        "rope_theta": metadata.get("llama.rope.freq_base", 10_000.0),
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    for name in ("rope_theta", "rms_norm_eps"):
        values[name] = float(str(np.float32(values[name])))  # 1e-05, not 9.99999974e-06
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        values["rope_scaling"] = {"rope_type": scaling}
    return values


def _half_split(matrix: np.ndarray, heads: int) -> np.ndarray:
    """[H E, D] with rows 2 j and 2 j + 1 of each head at j and j + E/2."""
    pairs = matrix.reshape(heads, -1, 2, matrix.shape[1])
    return pairs.swapaxes(1, 2).reshape(matrix.shape)


def _hub_name(name: str) -> str:
    """The name in a Llama of the hub; as it is where there is no counterpart."""
    stem, dot, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}{dot}{kind}"
    _, layer, part = (*stem.split("."), "", "")[:3]
    return f"model.layers.{layer}.{_IN_LAYER[part]}{dot}{kind}" if part in _IN_LAYER else name


def _tokenizer(metadata: dict[str, Any]) -> str | None:
    """The byte-level BPE of the file as JSON."""
    split = _SPLITS.get(metadata.get("tokenizer.ggml.pre", ""))
    if metadata.get("tokenizer.ggml.model") != "gpt2" or split is None:
        return None
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": token, **flags, "special": True}
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == _CONTROL
    ]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    bytes_["use_regex"] = True
    description = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*split, bytes_]},
        "post_processor": None,
        "decoder": bytes_,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }
    return json.dumps(description, ensure_ascii=False)
