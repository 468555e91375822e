"""What `benchmarks/kernels.py` says of options that it cannot follow."""

import importlib.util
import pathlib
import sys

import pytest

PATH = pathlib.Path(__file__).parents[2] / "benchmarks" / "kernels.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("kernels_benchmark", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--chips v9", "chip is 'v9': choose from v4, v5e"),
        ("--widths 128,0", "0 is no size: give at least 1"),
        ("--tokens -1", "-1 is no size: give at least 1"),
        ("--only phase3", "no function's name holds 'phase3': there are phase 1, "),
        ("--measure", "--measure takes a TPU, and this machine's devices are "),
    ],
)
def test_refused(benchmark, options, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kernels.py", *options.split()])
    with pytest.raises(SystemExit, match="2"):
        benchmark.main()
    assert sentence in capsys.readouterr().err
