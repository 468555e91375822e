"""depthjax models in the real lm-evaluation-harness, and the harness's own reading of our tasks.

These tests need the extra `lm-eval`, and are skipped without it.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_tasks import CHOICES

lm_eval = pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402

from depthjax.data import load_tokenizer  # noqa: E402
from depthjax.evals import TASKS, Pair, evaluate_task, log_likelihoods  # noqa: E402
from depthjax.evals.harness import HarnessModel  # noqa: E402
from depthjax.infer import Sampling, generate  # noqa: E402
from depthjax.models import Shape, Transformer  # noqa: E402
from depthjax.residuals import PreLN  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CONTEXT = 24
YAMLS = {"arc_easy": "arc/arc_easy", "winogrande": "winogrande/default", "social_iqa": "siqa/siqa"}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("neox")


@pytest.fixture(scope="module")
def model(tokenizer):
    shape = Shape(layers=2, width=16, heads=2, kv_heads=1, mlp_width=16)
    vocab = tokenizer.vocab_size
    return Transformer(shape, vocab, PreLN(), init_std=0.5, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def harness(model, tokenizer):
    return HarnessModel(model, tokenizer, CONTEXT)


def ask(kind, *arguments):
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def log_softmax(model, ids):
    return np.asarray(jax.nn.log_softmax(jax.jit(lambda ids: model(ids))(jnp.array([ids]))[0]))


@pytest.fixture(scope="module")
def theirs(model, tokenizer, tmp_path_factory):
    """What the harness makes of its own tasks on a row of ours each, read from a file."""
    here = tmp_path_factory.mktemp("tasks")
    folder = pathlib.Path(lm_eval.__file__).parent / "tasks"
    paths = []
    for name, (row, _) in CHOICES.items():
        rows = here / f"{name}.jsonl"
        rows.write_text(json.dumps(row) + "\n")
        own = {
            "include": str(folder / f"{YAMLS.get(name, f'{name}/{name}')}.yaml"),
            "task": f"own_{name}",
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {
                "data_files": {split: str(rows) for split in ("train", "validation", "test")},
                "cache_dir": str(here / "cache"),
            },
        }
        paths.append(here / f"{name}.yaml")
        paths[-1].write_text(json.dumps(own))  # JSON is YAML
    return lm_eval.simple_evaluate(
        HarnessModel(model, tokenizer, 512),
        tasks=[str(path) for path in paths],
        bootstrap_iters=0,
        log_samples=True,
    )


@pytest.mark.parametrize("name", CHOICES)
def test_the_harness_asks_and_scores_the_same(name, theirs, model, tokenizer):
    (sample,) = theirs["samples"][f"own_{name}"]
    documents = TASKS[name].documents([CHOICES[name][0]])
    assert tuple(tuple(arguments) for arguments in sample["arguments"]) == documents[0].pairs
    mine = evaluate_task(model, TASKS[name], documents, tokenizer, context=512).measures
    found = theirs["results"][f"own_{name}"]
    assert mine == {measure: found[f"{measure},none"] for measure in mine}
    missing = {"acc", "acc_norm"} - mine.keys()
    assert not any(f"{measure},none" in found for measure in missing)


def test_log_likelihoods_lose_the_beginning_of_long_requests(model, tokenizer, harness):
    long = "one two three four five six seven eight nine ten " * 4
    requests = [ask("loglikelihood", long, "eleven twelve"), ask("loglikelihood", "", "Hello")]
    found = harness.loglikelihood(requests, disable_tqdm=True)
    ids = tokenizer.encode_plain([long + "eleven twelve"])[0][-CONTEXT - 1 :]
    target = len(tokenizer.encode_plain([" eleven twelve"])[0])
    table = log_softmax(model, ids)
    wanted = sum(table[t - 1, ids[t]] for t in range(len(ids) - target, len(ids)))
    assert found[0][0] == pytest.approx(wanted, rel=1e-5)
    hello = tokenizer.encode_plain(["Hello"])[0]
    wanted = log_softmax(model, [tokenizer.eos_id, *hello])[0, hello[0]]
    assert found[1][0] == pytest.approx(wanted, rel=1e-5)


def test_rolling_predicts_every_token_once(model, tokenizer, harness):
    """Windows of a context each; the last one takes as much before it as fits."""
    text = "the quick brown fox jumps over the lazy dog and " * 5
    ids = [tokenizer.eos_id, *tokenizer.encode_plain([text])[0]]
    wanted, start = 0.0, 1
    while start < len(ids):
        end = min(start + CONTEXT, len(ids))
        begin = max(0, end - CONTEXT - 1)
        pair = Pair(ids[begin:end], start - begin)
        wanted += log_likelihoods(model, [pair]).log_likelihood[0]
        start = end
    (found,) = harness.loglikelihood_rolling([ask("loglikelihood_rolling", text)], True)
    assert found == pytest.approx(wanted, rel=1e-5)


def test_generation_ends_at_the_first_stop(model, tokenizer, harness):
    ids = generate(model, [tokenizer.encode_plain(["Hello world"])[0]], 8, Sampling(0))[0]
    whole = tokenizer.decode(ids)
    stop = tokenizer.decode(ids[3:5])
    options = {"until": [stop, "never"], "max_gen_toks": 8, "do_sample": False}
    free = {"until": [], "max_gen_toks": 8}
    requests = [ask("generate_until", "Hello world", o) for o in (options, free)]
    requests += [ask("generate_until", "Hello world " * 40, free)]  # longer than the context
    found = harness.generate_until(requests, disable_tqdm=True)
    assert found[0] == whole[: whole.index(stop)]
    assert found[1] == whole
    assert found[2]
