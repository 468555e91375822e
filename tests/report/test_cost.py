"""`depthjax cost`: the published figures, and what is measured."""

import csv

import pytest

from depthjax.cli import main

SHAPES = "400m-L16,400m-L70"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["cost", *arguments])
    return stop.value.code


def read(folder) -> dict[tuple[str, str], dict[str, str]]:
    with (folder / "cost.csv").open() as file:
        return {(row["residual"], row["shape"]): row for row in csv.DictReader(file)}


def test_the_published_costs(tmp_path):
    """DepthBench, figure 11 and appendix D: 2.98 -> 4.33 TFLOP and 304 -> 700 MiB without, 2.99 ->
    4.43 TFLOP with Full Attention Residuals."""
    names = "pre_ln,full_attnres,block_attnres"
    assert run("--shapes", SHAPES, "--residuals", names, "--out", str(tmp_path)) == 0
    rows = read(tmp_path)
    published = {"pre_ln": (2.98, 4.33), "full_attnres": (2.99, 4.43)}
    for name, values in published.items():
        for shape, tera, mebi in zip(SHAPES.split(","), values, (304, 700), strict=True):
            row = rows[name, shape]
            assert float(row["flops"]) / 1e12 == pytest.approx(tera, abs=0.005)
            assert int(row["key_value_bytes"]) == mebi * 2**20
            assert row["seconds"] == row["peak_bytes"] == ""
    block = rows["block_attnres", "400m-L16"]  # 7 inner boundaries, a source of 4 D FLOPs each
    assert int(block["flops_published"]) - int(block["flops"]) == 7 * 4 * 1216 * 4096
    assert "as published" in (tmp_path / "cost.html").read_text()
    assert (tmp_path / "cost.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.jax_version
def test_measured_figures(tmp_path):
    options = ("--residuals", "pre_ln,hc", "--tokens", "16", "--dtype", "float32", "--batch", "2")
    out = ("--measure", "--out", str(tmp_path))
    assert run("--shapes", "tiny-L8", *options, *out) == 0
    for row in read(tmp_path).values():
        seconds, hours = float(row["seconds"]), float(row["hours_per_billion_tokens"])
        assert hours == pytest.approx(seconds / 32 * 1e9 / 3600)
        parameters = 4 * (2 * 50280 * 128 + 8 * (4 * 128 * 128 + 3 * 128 * 352))
        assert parameters < int(row["peak_bytes"]) < 2 * parameters


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shapes", "tiny-L8"], "residuals is missing"),
        (["--shapes", "400m-L17", "--residuals", "hc"], "did you mean 500m-L17"),
        (["--shapes", "tiny-L8", "--residuals", "pre-ln"], "did you mean pre_ln"),
        (["--shapes", "tiny-L8", "--residuals", "hc,hc"], "name each once"),
        (["--shapes", "tiny-L8", "--residuals", "hc", "--batch", "2"], "give --measure as well"),
        (["--shapes", "tiny-L8", "--residuals", "hc", "--tokens", "x"], "tokens is 'x'"),
        (["--shapes", "tiny-L8", "--residuals", "hc", "--dtype", "int8"], "dtype is 'int8'"),
        (["--shape", "tiny-L8"], "did you mean --shapes"),
        (["--shapes", "tiny-L8", "--residuals", "hc", "--out", "."], "which holds other things"),
    ],
)
def test_bad_input(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    assert run(*arguments) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
