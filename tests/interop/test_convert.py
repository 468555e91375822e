"""`depthjax convert` as a user meets it, and what training and evaluation make of its folders."""

import dataclasses
import json
import os
import pathlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file
from small_models import assert_same, parameters, random_model, small_config

from depthjax.cli import main
from depthjax.config import Config, DataConfig, RunConfig, TrainConfig, import_file, variant_source
from depthjax.errors import InputError
from depthjax.interop import FORMATS, export, write_checkpoint
from depthjax.residuals import REGISTRY, FullAttnRes
from depthjax.train import train
from depthjax.train.evaluate import evaluate_run
from depthjax.train.source import trained_model
from depthjax.train.step import Program

PARITY = pathlib.Path(__file__).parent.parent / "parity"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """One cache for these tests, unless there is one already."""
    with pytest.MonkeyPatch.context() as patch:
        if "DEPTHJAX_CACHE" not in os.environ:
            patch.setenv("DEPTHJAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Each command runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)


def convert(capsys, *arguments):
    """(exit status, stdout, stderr) of the command in this process."""
    with pytest.raises(SystemExit) as stop:
        main(["convert", *arguments])
    return stop.value.code, *capsys.readouterr()


def converted(capsys, *arguments) -> str:
    status, out, stderr = convert(capsys, *arguments)
    assert status == 0, stderr
    return out


def refused(capsys, *arguments) -> str:
    status, _, stderr = convert(capsys, *arguments)
    assert status == 2, stderr
    assert stderr.startswith("depthjax: ")
    assert stderr.count("\n") == 1, stderr
    return stderr


def model_of(path):
    return trained_model(str(path), print)[1]


@pytest.fixture
def fixture():
    """A DepthBench checkpoint in the folder at hand: plain.safetensors and plain.json."""
    config = json.loads((PARITY / "models" / "preln_gqa.json").read_text())
    weights = import_file(PARITY / "weights.py").draw(config["seed"], config["weights"])
    save_file(weights, "plain.safetensors")
    pathlib.Path("plain.json").write_text(json.dumps(config))
    return "plain.safetensors"


def test_through_every_format_and_back(capsys, fixture):
    converted(capsys, fixture, "one")
    out = converted(capsys, "one", "mixed", "--to-residual", "block_attnres")
    assert "log-probabilities on random token ids: at most" in out
    assert "mixed: depthjax, block_attnres, 6 layers of width 48, 163,152 parameters" in out
    converted(capsys, "one", "llama", "--to", "llama")
    converted(capsys, "llama", "two")
    converted(capsys, "mixed", "kimi", "--to", "kimi_k3")
    converted(capsys, "kimi", "three")
    converted(capsys, "mixed", "theirs.safetensors", "--to", "depthbench")
    converted(capsys, "theirs.safetensors", "four", "--from", "depthbench")
    assert_same(model_of("one"), model_of("two"))
    for copy in ("three", "four"):
        assert_same(model_of("mixed"), model_of(copy))


def test_block_size_and_config_elsewhere(capsys, fixture):
    pathlib.Path(fixture).rename("bare.safetensors")
    assert "bare.json, or give --config" in refused(capsys, "bare.safetensors", "out")
    options = ["--config", "plain.json", "--to-residual", "block_attnres"]
    converted(capsys, "bare.safetensors", "out", *options, "--block-size-sublayers", "3")
    assert model_of("out").residual.rule.block == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing", "out"], ["nothing does not exist"]),
        (["plain.safetensors"], ["OUT"]),
        (["plain.safetensors", ""], ["empty"]),
        (["plain.safetensors", "out", "--from", "depthbnech"], ["--from", "depthbench"]),
        (["plain.safetensors", "out", "--to", "lama"], ["--to is 'lama'", "llama"]),
        (["plain.safetensors", "out", "--from", "llama"], ["'hidden_size'", "add it"]),
        (["plain.safetensors", "out", "--form", "llama"], ["form"]),
        (["plain.safetensors", "out", "--config", "empty.json"], ["does not tell", "--from"]),
        (["plain.safetensors", "out", "--config", "no.json"], ["--config is 'no.json'", "no file"]),
        (["plain.safetensors", "out", "--config", ""], ["--config is ''", "no file"]),
        (["plain.safetensors", "out", "--to", "kimi_k3"], ["pre_ln", "Kimi K3"]),
        (["plain.safetensors", "out", "--to-residual", "highway"], ["highway"]),
        (["plain.safetensors", "out", "--to-residual", "lns"], ["'lns'", "full_attnres"]),
        (["plain.safetensors", "out", "--block-size-sublayers", "2"], ["--to-residual"]),
        (["plain.safetensors", "there"], ["there exists already"]),
        (["plain.safetensors", "there/plain.pt", "--to", "depthbench"], ["torch"]),
        (["plain.safetensors", "two.safetensors"], ["OUT is 'two.safetensors'", "a folder"]),
        (["there", "out"], ["there/config.json", "--config"]),
        (["there", "out", "--from", "depthjax"], ["there is no run directory"]),
        (["there", "out", "--from", "depthjax", "--config", "plain.json"], ["leave it out"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_bad_arguments(capsys, monkeypatch, fixture, arguments, words):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    pathlib.Path("empty.json").write_text("{}")
    pathlib.Path("there").mkdir()
    message = refused(capsys, *arguments)
    assert all(word in message for word in words), message
    assert not pathlib.Path("out").exists()


@pytest.mark.parametrize("config", ["nowhere.json", "plain.json", ""])
def test_a_folder_of_depthjax_has_its_config(capsys, fixture, config):
    pathlib.Path("run").mkdir()
    pathlib.Path("run/config.json").write_text('{"model": {}}')
    message = refused(capsys, "run", "out", "--config", config)
    assert f"--config is '{config}', but depthjax folders have one: leave it out" in message


MINE = """
import dataclasses
from depthjax.residuals import PreLN

@dataclasses.dataclass(frozen=True)
class Mine(PreLN):
    name = "mine"
    gain: float = 2.0
"""


def test_a_residual_connection_from_elsewhere_goes_along(capsys, tmp_path):
    """From a folder that has its source, in which it is found again each time."""
    source = tmp_path / "mine.py"
    source.write_text(MINE)
    config = small_config(import_file(source).Mine(gain=3.0), layers=2)
    tensors, values = export(FORMATS["depthjax"], config, random_model(config))
    beside = {"residual.py": variant_source(config.residual)}
    write_checkpoint("one", tensors, values, beside)
    source.unlink()
    for given, out in (("one", "two"), ("two", "three")):
        del REGISTRY["mine"]
        assert "mine, 2 layers" in converted(capsys, given, out)
    del REGISTRY["mine"]
    config, model = trained_model("three", print)
    assert config.residual.gain == 3.0
    assert pathlib.Path("three/residual.py").read_text() == MINE
    assert {name for name, value in parameters(model).items()} == tensors.keys()
    for name in ("depthbench", "llama", "kimi_k3"):
        assert "'mine'" in refused(capsys, "three", "out", "--to", name)
    pathlib.Path("three/residual.py").write_text("nonsense(")
    del REGISTRY["mine"]
    assert "three/config.json cannot be read" in refused(capsys, "three", "out")


def test_files_of_one_name_stay_apart(tmp_path):
    """Two folders, each with a residual connection of its own, in one process."""
    sources = MINE, MINE.replace("mine", "yours").replace("Mine", "Yours")
    for i, source in enumerate(sources):
        (tmp_path / f"{i}").mkdir()
        (tmp_path / f"{i}" / "residual.py").write_text(source)
        import_file(tmp_path / f"{i}" / "residual.py")
    assert tuple(variant_source(REGISTRY[name]()) for name in ("mine", "yours")) == sources


def test_hyperparameters_without_blocks(capsys, fixture):
    options = ["--to-residual", "full_attnres", "--block-size-sublayers", "2"]
    assert "has no blocks" in refused(capsys, fixture, "out", *options)


def test_faulty_tensors_are_listed(capsys, fixture):
    config = json.loads(pathlib.Path("plain.json").read_text())
    pathlib.Path("plain.json").write_text(json.dumps({**config, "n_layers": 7, "vocab_size": 98}))
    message = refused(capsys, fixture, "out")
    assert "blocks.6.attention.w_q.weight is missing, of shape (48, 48)" in message
    assert "embeddings.weight has shape (97, 48), not (98, 48)" in message


def test_help(capsys):
    status, out, _ = convert(capsys, "--help")
    assert status == 0
    assert all(f"- {name}: " in out for name in FORMATS)


def run_config(tmp_path, **train_options) -> Config:
    """A run on the embedded corpus."""
    return dataclasses.replace(
        small_config(layers=2, vocab=None),
        data=DataConfig(tokenizer="bpe8k"),
        train=TrainConfig(**{"steps": 2, "batch": 8, **train_options}),
        run=RunConfig(dir=str(tmp_path / "run"), log_every=1, eval_batches=1),
    )


def test_from_a_run_to_a_folder_and_on_with_training(capsys, tmp_path):
    config = run_config(tmp_path)
    summary, _ = train(config)
    run, folder = config.run.dir, str(tmp_path / "folder")
    converted(capsys, run, "folder")
    converted(capsys, "folder", "theirs.safetensors", "--to", "depthbench")
    converted(capsys, "theirs.safetensors", "again")
    assert_same(model_of(run), model_of("folder"))
    assert_same(model_of("folder"), model_of("again"))

    # A model folder is evaluated like the run that it came from.
    in_folder = dataclasses.replace(config.run, dir=folder)
    saved, _ = trained_model(folder, print)
    losses = evaluate_run(dataclasses.replace(saved, run=in_folder), print)
    assert losses == {name: summary[name] for name in losses} != {}

    # Training goes on from a converted folder, and only from one that fits.
    converted(capsys, "folder", "mixed", "--to-residual", "block_attnres")
    mixed, model = trained_model("mixed", print)
    after = dataclasses.replace(config.run, dir=str(tmp_path / "after"), save_every=1)
    options = dataclasses.replace(config.train, init_from="mixed", steps=1)
    begun = dataclasses.replace(config, model=mixed.model, run=after, train=options)
    trained, _ = train(begun)
    assert trained["train_loss"] < 9.1
    assert abs(trained["heldout_loss"] - summary["heldout_loss"]) < 0.05
    before, now = parameters(model), parameters(model_of(after.dir))
    assert all(np.abs(now[name] - value).max() < 0.01 for name, value in before.items())

    # The run resumes from its own checkpoint, whatever has become of the folder since.
    shutil.rmtree("mixed")
    assert train(begun)[0]["parameters_sha256"] == trained["parameters_sha256"]
    elsewhere = dataclasses.replace(options, init_from="folder")
    with pytest.raises(InputError, match=r"train\.init_from: 'mixed' -> 'folder'"):
        train(dataclasses.replace(begun, train=elsewhere))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"layers": 3}, ["attention/query has shape (2, 16, 4, 4), not (3, 16, 4, 4)"]),
        ({"vocab": 9000}, ["embedding has shape (8192, 16), not (9000, 16)"]),
        ({"residual": FullAttnRes()}, ["residual/mlp/query is missing, of shape (2, 16)"]),
        ({"rope_theta": 500.0}, ["(model.rope_theta: 10000.0, here 500.0): set these alike"]),
    ],
    ids=str,
)
def test_start_that_does_not_fit(tmp_path, monkeypatch, change, words):
    model = small_config(layers=2, vocab=8192)
    write_checkpoint("folder", *export(FORMATS["depthjax"], model, random_model(model)))
    config = run_config(tmp_path, init_from="folder")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **change))

    class NeverStarted(Program):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.init = self.start = None

    monkeypatch.setattr("depthjax.train.loop.Program", NeverStarted)
    with pytest.raises(InputError if words else TypeError) as error:
        train(config)
    for word in words or []:
        assert word in str(error.value)
    assert words is None or "train.init_from is 'folder'" in str(error.value)


@pytest.mark.parametrize("folder", ["nothing", ""])
def test_start_that_is_not_there(tmp_path, folder):
    with pytest.raises(InputError, match=r"nothing is no model folder|init_from is empty"):
        train(run_config(tmp_path, init_from=folder))
