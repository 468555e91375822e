"""Log-likelihoods against the plain softmax of the whole forward, and what is made of them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from depthjax.evals import (
    TASKS,
    Document,
    Pair,
    TaskResult,
    category_means,
    choice_accuracy,
    choice_measures,
    evaluate_task,
    log_likelihoods,
    task_size,
)
from depthjax.evals import score as score_module
from depthjax.models import Shape, Transformer
from depthjax.residuals import BlockAttnRes

pytestmark = pytest.mark.jax_version

VOCAB = 61


@pytest.fixture(scope="module")
def model():
    shape = Shape(layers=3, width=32, heads=2, kv_heads=1, mlp_width=48)
    rule = BlockAttnRes(block_size_sublayers=3)
    return Transformer(shape, VOCAB, rule, init_std=0.3, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def log_softmax(model):
    """Of rows of 80 tokens with a layer left out, or none (-1): the whole table, at once."""
    table = jax.jit(lambda ids, skip: jax.nn.log_softmax(model(ids, skip=skip)))
    return lambda ids, skip=-1: np.asarray(table(ids, skip))


@pytest.fixture(scope="module")
def pairs():
    """Random ones of 2 to 80 tokens, one without a completion, and one that is greedy."""
    rng = np.random.default_rng(0)
    lengths = [2, 80, 33, 64, *rng.integers(3, 80, size=15)]
    starts = [1, 1, 32, 40, *(int(rng.integers(1, n)) for n in lengths[4:])]
    made = [
        Pair(rng.integers(VOCAB, size=n).tolist(), s) for n, s in zip(lengths, starts, strict=True)
    ]
    return [*made, Pair([1, 2, 3], 3)]


@pytest.fixture(scope="module")
def greedy_pair(log_softmax):
    ids = [5, 9]
    for _ in range(4):
        table = log_softmax(jnp.array([ids + [0] * (80 - len(ids))]))
        ids.append(int(table[0, len(ids) - 1].argmax()))
    return Pair(ids, 2)


def expected(log_softmax, pairs, skip=-1):
    rows = np.zeros((len(pairs), 80), np.int32)
    for row, pair in zip(rows, pairs, strict=True):
        row[: len(pair.ids)] = pair.ids
    table = log_softmax(rows, skip)
    return [
        sum(own[t - 1, pair.ids[t]] for t in range(pair.start, len(pair.ids)))
        for own, pair in zip(table, pairs, strict=True)
    ]


def data_mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize("devices", [1, 8])
def test_equal_to_the_whole_softmax(model, log_softmax, pairs, greedy_pair, devices, monkeypatch):
    # Several batches of a length, and several chunks of a completion.
    monkeypatch.setitem(score_module._LIMITS, "cpu", (256, 8 * VOCAB))
    found = log_likelihoods(model, [*pairs, greedy_pair], mesh=data_mesh() if devices > 1 else None)
    wanted = expected(log_softmax, [*pairs, greedy_pair])
    np.testing.assert_allclose(found.log_likelihood, wanted, rtol=2e-5, atol=2e-5)
    assert found.greedy.tolist()[-2:] == [True, True]
    assert not found.greedy[:4].any()


def test_one_program_leaves_out_any_layer(model, log_softmax, pairs):
    pairs = [pair for pair in pairs if len(pair.ids) <= 32]
    before = score_module._score._cache_size()
    for layer in range(3):
        found = log_likelihoods(model, pairs, skip=layer).log_likelihood
        wanted = expected(log_softmax, pairs, layer)
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)
    assert score_module._score._cache_size() == before + 1


class Letters:
    """A tokenizer with a token a letter."""

    eos_id = 0

    def encode_plain(self, texts):
        return [[ord(letter) - 64 for letter in text] for text in texts]


def test_choices_and_accuracy(model, log_softmax):
    documents = [
        Document((("ABC", "DE"), ("ABC", "F"), ("ABC", "GHI")), gold, (2, 1, 3))
        for gold in (0, 1, 2)
    ]
    found = choice_accuracy(model, documents, Letters(), skip=1)
    ids = [Pair(Letters().encode_plain([a + b])[0], 3) for a, b in documents[0].pairs]
    scores = np.array(expected(log_softmax, ids, 1))
    best, best_norm = scores.argmax(), (scores / [2, 1, 3]).argmax()
    # Each choice is right in one of three documents, so that any model is right once.
    assert found == {"acc": 1 / 3, "acc_norm": 1 / 3}
    right = [documents[best]], [documents[best_norm]]
    assert choice_accuracy(model, right[0], Letters(), skip=1)["acc"] == 1
    assert choice_accuracy(model, right[1], Letters(), skip=1)["acc_norm"] == 1


def test_measures_of_known_scores():
    """acc by the likelihood, acc_norm by the one a character; the first of equals counts."""
    two = (("q", " a"), ("q", " bbbb"))
    documents = [Document(two, 0, (1, 4)), Document(two, 1, (1, 4)), Document(two, 0, (1, 1))]
    scores = np.array([-2.0, -4.0, -2.0, -4.0, -3.0, -3.0])
    assert choice_measures(documents, scores) == {"acc": 2 / 3, "acc_norm": 2 / 3}
    assert choice_measures(documents[:1], scores[:2]) == {"acc": 1.0, "acc_norm": 0.0}
    assert choice_measures(documents[1:2], scores[2:4]) == {"acc": 0.0, "acc_norm": 1.0}


def test_nll_weighs_tokens_alike(model, log_softmax):
    """A long document counts for more than a short one."""
    documents = [Document((("AB", "CDEFGHIJKL"),)), Document((("MN", "O"),))]
    result = evaluate_task(model, TASKS["gsm8k"], documents, Letters(), context=11)
    ids = [Pair(Letters().encode_plain([a + b])[0], 2) for d in documents for a, b in d.pairs]
    wanted = -sum(expected(log_softmax, ids)) / 11
    assert math.isclose(result.measures["nll"], wanted, rel_tol=2e-5)
    size = result.size
    assert (size.documents, size.target_tokens, size.longest) == (2, 11, 12)
    assert size.over_context == 1


def test_a_category_is_the_plain_mean_of_its_tasks():
    def result(name, nll, tokens):
        document = Document((("A", "B" * tokens),))
        pairs = [Pair([1] * (tokens + 1), 1)]
        return TaskResult(task_size(TASKS[name], [document], pairs, 100), {"nll": nll})

    both = {"mbpp": result("mbpp", 1.0, 50), "humaneval": result("humaneval", 2.0, 1)}
    alone = {"gsm8k": result("gsm8k", 3.0, 1)}
    assert category_means(both | alone) == {"coding": 1.5}
