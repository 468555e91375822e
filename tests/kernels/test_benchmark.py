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


SCHEDULE = """\
   0x0   :  { %s9_s1 = smov.u32 0 }
  0x10 LB: > { %s1_s6 = sphi %s9_s1, %s2_s6 }
  0x11   : > { %s5_s7 = smov.u32 (!%p3_p6), 1 }
  0x20 LB: >> { %s3_s8 = sphi %s5_s7, %s4_s8 /* phi copy */ ;;  %v1 = vld [vmem:[%s1] }
  0x21   : >> { %s4_s8 = sadd.s32 1, %s3_s8 ;;  %p1 = scmp.ge.s32.totalorder %s4_s8, 4 /* loop exit test */ }
  0x30   : > { %p2 = scmp.ge.s32.totalorder %s2_s6, 66 /* loop exit test */ }
"""  # noqa: E501


def test_a_loop_runs_from_its_start_to_its_end(benchmark):
    """In each of 64 steps three bundles, and two of the loop over 1, 2 and 3."""
    assert benchmark.cycles(SCHEDULE, 64) == 64 * (3 + 2 * 3)


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
