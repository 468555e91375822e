"""A cache of this session's own, and small corpora whose documents all differ."""

import os

import numpy as np
import pytest

from depthjax.data import prepare


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Keep what depthjax caches in a folder of this session, child processes included."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setitem(os.environ, "DEPTHJAX_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def texts():
    """Sixty documents of 1 to 60 words, one empty, some beyond ASCII, with all line ends."""
    rng = np.random.default_rng(0)
    words = [
        "union",
        "states",
        "naïve",
        "\n",
        "\r\n",
        "東京",
        "🙂",
        "  ",
        "e\u0301",
        "peace,",
        "1792",
    ]
    texts = [f"{i} " + " ".join(rng.choice(words, rng.integers(1, 60))) for i in range(60)]
    texts[7] = ""
    return texts


@pytest.fixture(scope="session")
def text_tree(tmp_path_factory, texts):
    """The documents as .txt files in three folders, which sort in the order of `texts`."""
    root = tmp_path_factory.mktemp("tree")
    for i, text in enumerate(texts):
        path = root / str(i // 20) / f"{i:03d}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode())
    (root / "README").write_text("not a document")
    return root


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, text_tree):
    """The documents as bpe8k shards in several groups; tests must not write to it."""
    out = tmp_path_factory.mktemp("prepared") / "shards"
    prepare(text_tree, out, tokenizer="bpe8k", shard_tokens=1500, progress=False)
    return out
