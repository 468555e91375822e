"""`depthjax probe` as a user meets it."""

import json
import os

import numpy as np
import pytest

from depthjax.cli import main
from depthjax.cli_probe import names_of
from depthjax.config import Config, DataConfig, ModelConfig, build_model
from depthjax.interop import DEPTHJAX, export, write_checkpoint
from depthjax.probes.diagnostics import DIAGNOSTICS
from depthjax.residuals import HC, FullAttnRes, PreLN, Residual


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    old = os.environ.get("DEPTHJAX_CACHE")
    os.environ["DEPTHJAX_CACHE"] = old or str(tmp_path_factory.mktemp("cache"))
    yield
    if old is None:
        del os.environ["DEPTHJAX_CACHE"]


def model_folder(path, residual: Residual, vocab: int = 8192, tokenizer: str = "bpe8k") -> str:
    """A model of three layers as it starts, in a folder."""
    sizes = {"layers": 3, "width": 16, "heads": 2, "mlp_width": 24, "context": 16}
    model = ModelConfig("custom", residual=residual, vocab=vocab, dtype="float32", **sizes)
    config = Config(model=model, data=DataConfig(tokenizer=tokenizer))
    write_checkpoint(path, *export(DEPTHJAX, config, build_model(config, vocab)))
    return str(path)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("models")
    variants = {"plain": PreLN(), "sources": FullAttnRes(), "streams": HC()}
    return [model_folder(root / name, residual) for name, residual in variants.items()]


def probe(capsys, *arguments: str):
    """(exit status, stdout, stderr)."""
    with pytest.raises(SystemExit) as stop:
        main(["probe", *arguments])
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def test_several_models_one_page(folders, tmp_path, capsys):
    """What applies to some is drawn of these, what does not is listed with its reason; a second
    command measures what the first did not."""
    out = tmp_path / "out"
    names = "causal_score,transport_effective_rank,newest_source_weight"
    status, printed, _ = probe(capsys, *folders, "--out", str(out), "--only", names)
    assert status == 0
    assert str(out / "report.html") in printed
    page = (out / "report.html").read_text()
    for name in ("plain", "sources", "streams"):
        assert name in printed
        meta = json.loads((out / name / "meta.json").read_text())
        for reason in meta["not_applicable"].values():
            assert reason in page
        assert ("transport_effective_rank" in meta["done"]) == (name == "streams")
        assert ("newest_source_weight" in meta["done"]) == (name == "sources")
    for figure in ("causal_score", "transport_effective_rank", "newest_source_weight"):
        assert f'<figure id="{figure}">' in page

    score = (out / "plain" / "causal_score.npz").stat().st_mtime_ns
    assert probe(capsys, *folders, "--out", str(out), "--only", "path_weights")[0] == 0
    page = (out / "report.html").read_text()
    assert '<figure id="path_weights">' in page
    assert '<figure id="causal_score">' in page
    assert (out / "plain" / "causal_score.npz").stat().st_mtime_ns == score
    with np.load(out / "plain" / "path_weights.npz") as file:
        weights = file["weights"]
    np.testing.assert_allclose(weights[np.isfinite(weights)], 1, rtol=1e-6)  # of a plain stream


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "needs a run directory"),
        (["nowhere"], "nowhere is no run directory"),
        (["{0}", "--only", "causal"], "did you mean causal_score"),
        (["{0}", "--budget", "smal"], "did you mean small"),
        (["nowhere", "--budget", "smal"], "did you mean small"),  # before anything is loaded
        (["a b", "a_b"], "a b and a_b would both be called"),
        (["{0}", "--outt", "x"], "did you mean --out"),
        (["{0}", "{0}"], "named twice"),
        (["{0}", "--out", "taken"], "which holds other things"),
        (["{0}", "--out", "taken/mine.txt"], "which is no folder"),
        (["{0}", "--data.dir", "nowhere"], "nowhere"),
        (["{0}", "{small}"], "vocabulary of 31, but"),
        (["{0}", "{other}"], "has data.tokenizer neox"),
    ],
)
def test_bad_input(arguments, words, folders, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine")
    made = {
        "small": model_folder(tmp_path / "small", PreLN(), vocab=31),
        "other": model_folder(tmp_path / "other", PreLN(), tokenizer="neox"),
    }
    before = sorted(tmp_path.rglob("*"))
    given = [argument.format(*folders, **made) for argument in arguments]
    status, _, said = probe(capsys, *given)
    assert status == 2
    assert words in said
    assert said.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_results_of_another_model_are_left_alone(folders, tmp_path, capsys):
    out = str(tmp_path / "out")
    only = ("--only", "path_weights", "--out", out)
    assert probe(capsys, folders[0], *only)[0] == 0
    other = model_folder(tmp_path / "plain", FullAttnRes())
    status, _, said = probe(capsys, other, *only)
    assert status == 2
    assert "other model" in said


def test_help_lists_the_diagnostics(capsys):
    status, printed, _ = probe(capsys, "--help")
    assert not status
    assert all(name in printed for name in DIAGNOSTICS)


def test_names_tell_checkpoints_apart(tmp_path):
    assert names_of(["runs/pre_ln", "runs/hc/"]) == ["pre_ln", "hc"]
    assert names_of(["/a/x/run", "/a/y/run"]) == ["x-run", "y-run"]
    assert names_of(["/runs/a b"]) == ["a_b"]
    assert names_of(["/x/a b", "/y/a_b"]) == ["x-a_b", "y-a_b"]
