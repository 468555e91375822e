"""Tokenizers agree with the published files and with themselves."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from depthjax.data import embedded_documents, load_tokenizer
from depthjax.data.tokenizer import BPE8K_IDS
from depthjax.errors import InputError

GOLDEN = json.loads((Path(__file__).parent / "golden_neox.json").read_text())


@pytest.fixture(scope="module")
def neox():
    return load_tokenizer("neox")


@pytest.fixture(scope="module", params=["neox", "bpe8k"])
def tokenizer(request):
    return load_tokenizer(request.param)


@pytest.mark.parametrize(("text", "ids"), GOLDEN["pairs"])
def test_neox_gives_the_ids_of_the_published_file(neox, text, ids):
    ended = ids if ids[-1:] == [neox.eos_id] else [*ids, neox.eos_id]
    assert neox.encode_documents([text])[0].tolist() == ended


def test_neox_equals_the_published_file_setting_for_setting(neox):
    assert neox.sha256 == GOLDEN["canonical_sha256"]
    assert (neox.vocab_size, neox.eos_id, neox.pad_id) == (50280, 50279, 1)


def test_neox_count_of_the_embedded_corpus(neox):
    documents = neox.encode_documents(embedded_documents())
    assert (len(documents), sum(map(len, documents))) == (25, 199_272)


def test_every_document_ends_in_exactly_one_added_end_of_text(tokenizer):
    texts = ["word", "", "word<|endoftext|>", "<|endoftext|>", "a<|endoftext|>b"]
    documents = tokenizer.encode_documents(texts)
    assert [int((ids == tokenizer.eos_id).sum()) for ids in documents] == [1, 1, 1, 1, 2]
    assert all(ids[-1] == tokenizer.eos_id and ids.dtype == np.int32 for ids in documents)


def test_decoding_an_encoded_nfc_text_restores_it(tokenizer, texts):
    for text in ["naïve 東京\r\n\t🙂  x", "a" * 1000, *(t for t in texts if "\u0301" not in t)]:
        assert tokenizer.decode(tokenizer.encode_documents([text])[0][:-1]) == text


def test_bpe8k_fits_the_embedding_of_its_size():
    bpe = load_tokenizer("bpe8k")
    assert bpe.vocab_size == BPE8K_IDS
    assert {bpe.eos_id, bpe.pad_id} == {0, 1}


def test_bpe8k_trained_twice_is_the_same_whatever_the_threads(tmp_path, monkeypatch):
    monkeypatch.setenv("DEPTHJAX_CACHE", str(tmp_path))
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    code = "from depthjax.data import load_tokenizer; print(load_tokenizer('bpe8k').sha256)"
    alone = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    monkeypatch.undo()
    assert alone.stdout.strip() == load_tokenizer("bpe8k").sha256


def test_a_tokenizers_file_is_loaded_with_its_truncation_and_padding_off(tmp_path, texts):
    bpe = load_tokenizer("bpe8k")
    parts = json.loads(bpe.canonical_json())
    parts["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(parts))
    mine = load_tokenizer(path)
    assert (mine.name, mine.sha256, mine.eos_id) == ("mine.json", bpe.sha256, bpe.eos_id)
    same = zip(mine.encode_documents(texts), bpe.encode_documents(texts), strict=True)
    assert all(np.array_equal(a, b) for a, b in same)


def test_padding_falls_back_to_the_end_of_text(tmp_path):
    from tokenizers import Tokenizer, models

    path = tmp_path / "tiny.json"
    Tokenizer(models.WordLevel({"a": 0, "<|endoftext|>": 7}, unk_token="a")).save(str(path))
    tiny = load_tokenizer(path)
    assert (tiny.vocab_size, tiny.eos_id, tiny.pad_id) == (8, 7, 7)


def test_an_unknown_tokenizer_is_named(tmp_path):
    with pytest.raises(InputError, match="'gpt5' is neither 'neox' nor 'bpe8k'"):
        load_tokenizer("gpt5")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(InputError, match=r"broken.json is not a tokenizers JSON file"):
        load_tokenizer(tmp_path / "broken.json")


def test_a_tokenizer_without_end_of_text_is_refused(tmp_path):
    from tokenizers import Tokenizer, models

    path = tmp_path / "open.json"
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path))
    with pytest.raises(InputError, match=r"open.json has no token <\|endoftext\|>"):
        load_tokenizer(path)


def test_the_cache_follows_the_environment(tmp_path, monkeypatch):
    from depthjax.data import cache_dir

    monkeypatch.setenv("DEPTHJAX_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("DEPTHJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/depthjax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "depthjax"
