"""GGUF files: what a writer of ours puts into one, and what is read out of it."""

import pathlib
import struct

import ml_dtypes
import numpy as np
import pytest
from small_models import parameters, random_model, replaced, small_config

from depthjax.cli import main
from depthjax.data import load_tokenizer
from depthjax.errors import InputError
from depthjax.interop import FORMATS, export, load, read_gguf
from depthjax.residuals import PreLN

F32, F16, Q4_1, Q8_0, BF16 = 0, 1, 3, 8, 30
U32, FLOAT, STRING, ARRAY, I32 = 4, 6, 8, 9, 5

# Text splits as in SmolLM2: digits one by one, the space with the word behind it.
TOKENS = [
    "<|endoftext|>",
    "a",
    "b",
    "ab",
    "1",
    "11",
    "Ġ",
    "Ġa",
    "Ġab",
    *map(chr, range(0x42, 0x58)),
]
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 3,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 8192,
    "llama.rope.freq_base": 100_000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, *[1] * (len(TOKENS) - 1)],
    "tokenizer.ggml.merges": ["a b", "1 1", "Ġ a", "Ġ ab"],
}


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def typed(value) -> bytes:
    if isinstance(value, list):
        kind = STRING if isinstance(value[0], str) else I32
        each = [text(v) if kind == STRING else struct.pack("<i", v) for v in value]
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(each)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + text(value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT, value)
    return struct.pack("<II", U32, value)


def quantize(weights: np.ndarray, kind: int) -> tuple[bytes, np.ndarray]:
    """(the bytes of a tensor, the values that they stand for), block by block in plain loops."""
    if kind in (F32, F16, BF16):
        stored = weights.astype({F32: "<f4", F16: "<f2", BF16: ml_dtypes.bfloat16}[kind])
        return stored.tobytes(), stored.astype(np.float32)
    data, values = b"", []
    for block in weights.reshape(-1, 32):
        least = float(np.float16(block.min()))
        span = np.abs(block).max() / 127 if kind == Q8_0 else (block.max() - block.min()) / 15
        scale = float(np.float16(span))
        if kind == Q8_0:
            whole = [round(float(w) / scale) for w in block]
            whole = [min(max(q, -128), 127) for q in whole]
            data += struct.pack("<e32b", scale, *whole)
            values += [scale * q for q in whole]
        else:
            whole = [min(max(round((float(w) - least) / scale), 0), 15) for w in block]
            packed = [low | high << 4 for low, high in zip(whole[:16], whole[16:], strict=True)]
            data += struct.pack("<ee16B", scale, least, *packed)
            values += [scale * q + least for q in whole]
    return data, np.array(values, np.float32).reshape(weights.shape)


def write_gguf(path: pathlib.Path, metadata: dict, tensors: dict) -> None:
    """tensors: name -> (shape, type, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(text(name) + typed(value) for name, value in metadata.items())
    body = b""
    for name, (shape, kind, data) in tensors.items():
        sizes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += text(name) + struct.pack("<I", len(shape)) + sizes
        head += struct.pack("<IQ", kind, len(body))
        body += data + bytes(-len(data) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + body)


def their_names(tensors: dict) -> dict:
    """A Llama's tensors under the names of llama.cpp."""
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    renamed = {}
    for name, tensor in tensors.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        renamed[name] = tensor
    return renamed


def neighbours(matrix: np.ndarray, size: int = 8) -> np.ndarray:
    """Rows j and j + E/2 of each head at 2 j and 2 j + 1, as llama.cpp has queries and keys."""
    rows = []
    for head in range(len(matrix) // size):
        for j in range(size // 2):
            rows += [matrix[head * size + j], matrix[head * size + j + size // 2]]
    return np.stack(rows)


@pytest.fixture(scope="module")
def llama():
    """(config, tensors of the hub) of a random model in which quantized blocks fit."""
    config = small_config(PreLN(eps=1e-5), width=32, mlp_width=64, vocab=len(TOKENS))
    config = replaced(config, rope_theta=100_000.0, context=2048)
    return config, export(FORMATS["llama"], config, random_model(config))[0]


def file_of(path, tensors, kinds, metadata=METADATA) -> dict[str, np.ndarray]:
    """Writes the tensors, and returns what they should be read as under the hub's names."""
    stored, expected = {}, {}
    for number, (name, tensor) in enumerate(tensors.items()):
        kind = kinds[number % len(kinds)] if tensor.ndim > 1 else F32
        turns = "q_proj" in name or "k_proj" in name
        data, values = quantize(neighbours(tensor) if turns else tensor, kind)
        (theirs,) = their_names({name: tensor})
        stored[theirs] = (tensor.shape, kind, data)
        expected[name] = np.stack([values[row] for row in order(len(values))]) if turns else values
    write_gguf(path, metadata, stored)
    return expected


def order(rows: int, size: int = 8) -> list[int]:
    """Where the rows are in a matrix of `neighbours`."""
    where = neighbours(np.arange(rows)[:, None], size)[:, 0].tolist()
    return [where.index(row) for row in range(rows)]


@pytest.mark.parametrize("kinds", [[F32], [Q4_1, Q8_0], [F16, BF16]])
def test_tensors_of_every_type(tmp_path, llama, kinds):
    config, tensors = llama
    expected = file_of(tmp_path / "model.gguf", tensors, kinds)
    values, found, _ = read_gguf(tmp_path / "model.gguf")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor, rtol=1e-6, atol=1e-7, err_msg=name)
    read, model = load(FORMATS["llama"], found, values)
    assert (read.model.rope_theta, read.model.context) == (100_000.0, 2048)
    assert read.shape == config.shape
    assert read.residual.eps == 1e-5
    if kinds == [F32]:
        for name, value in parameters(model).items():
            np.testing.assert_array_equal(value, parameters(random_model(config))[name], name)


def test_a_tied_head_is_the_embedding(tmp_path, llama):
    tensors = {name: t for name, t in llama[1].items() if name != "lm_head.weight"}
    file_of(tmp_path / "tied.gguf", tensors, [F16])
    values, found, _ = read_gguf(tmp_path / "tied.gguf")
    model = parameters(load(FORMATS["llama"], found, values)[1])
    np.testing.assert_array_equal(model["head"], model["embedding"].T)


def test_converted_with_its_tokenizer(tmp_path, llama, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file_of(tmp_path / "model.gguf", llama[1], [Q8_0])
    for arguments in (["model.gguf", "out"], ["out", "again"]):
        with pytest.raises(SystemExit) as stop:
            main(["convert", *arguments])
        assert stop.value.code == 0
    assert "pre_ln, 3 layers of width 32" in capsys.readouterr().out
    tokenizer = load_tokenizer("out/tokenizer.json")
    assert tokenizer.eos_id == 0
    assert tokenizer.encode_plain(["ab ab11<|endoftext|>"]) == [[3, 8, 4, 4, 0]]
    assert tokenizer.decode([3, 8, 4, 4]) == "ab ab11"
    assert str(tmp_path / "out" / "tokenizer.json") in pathlib.Path("again/config.json").read_text()


@pytest.mark.parametrize("option", [["--from", "depthbench"], ["--config", "config.json"]])
def test_nothing_is_said_about_a_file_that_says_it_itself(tmp_path, llama, capsys, option):
    file_of(tmp_path / "model.gguf", llama[1], [F16])
    with pytest.raises(SystemExit) as stop:
        main(["convert", str(tmp_path / "model.gguf"), str(tmp_path / "out"), *option])
    assert stop.value.code == 2
    assert "model.gguf is a GGUF file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_another_kind_is_left_out(tmp_path, llama):
    metadata = METADATA | {"tokenizer.ggml.pre": "llama-bpe"}
    file_of(tmp_path / "model.gguf", llama[1], [F16], metadata)
    assert read_gguf(tmp_path / "model.gguf")[2] is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"general.architecture": "gemma3"}, ["'gemma3'", "'llama'"]),
        ({"llama.attention.head_count": 0}, ["cannot be read as GGUF"]),
        ({"llama.block_count": None}, ["llama.block_count"]),
    ],
)
def test_other_metadata_is_refused(tmp_path, llama, change, words):
    metadata = {k: v for k, v in (METADATA | change).items() if v is not None}
    file_of(tmp_path / "model.gguf", llama[1], [F16], metadata)
    with pytest.raises(InputError) as error:
        read_gguf(tmp_path / "model.gguf")
    for word in (*words, "model.gguf"):
        assert word in str(error.value)


@pytest.mark.parametrize("part", [0, 3, 40, 1000, -100])
def test_a_file_cut_short_is_refused(tmp_path, llama, part):
    file_of(tmp_path / "model.gguf", llama[1], [F16])
    whole = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "part.gguf").write_bytes(whole[:part])
    with pytest.raises(InputError, match=r"part\.gguf"):
        read_gguf(tmp_path / "part.gguf")


def test_another_quantization_is_refused(tmp_path, llama):
    (name, tensor), *_ = llama[1].items()
    stored = {their_names({name: tensor}).popitem()[0]: (tensor.shape, 2, tensor.tobytes())}
    write_gguf(tmp_path / "q4_0.gguf", METADATA, stored)
    with pytest.raises(InputError, match="type 2: depthjax reads F32, F16, BF16, Q8_0 and Q4_1"):
        read_gguf(tmp_path / "q4_0.gguf")


def test_scaled_rotary_positions_are_refused(tmp_path, llama):
    file_of(tmp_path / "a.gguf", llama[1], [F16], METADATA | {"llama.rope.scaling.type": "yarn"})
    values, found, _ = read_gguf(tmp_path / "a.gguf")
    with pytest.raises(InputError, match="yarn"):
        load(FORMATS["llama"], found, values)
