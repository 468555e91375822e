"""`depthjax plan` as a user meets it, on this machine's CPU, and what it says of bad input."""

import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from depthjax.aot import topology
from depthjax.aot.compile import compile_lowered
from depthjax.aot.entry import GRADES, Entry
from depthjax.aot.knobs import helpful_knobs
from depthjax.aot.report import big, duration, gib, print_comparison, print_entry
from depthjax.cli import main
from depthjax.config import Config, ModelConfig, TrainConfig
from depthjax.errors import InputError
from depthjax.plan.hlo_buffers import Buffer
from depthjax.plan.hlo_collectives import Collective
from depthjax.plan.memory import TrainingBytes

KEYS = {
    *("variant", "shape", "topology", "devices", "argument_bytes", "temp_bytes", "peak_bytes"),
    *("hbm_bytes", "flops_compiled", "flops_formula", "collective_bytes", "hlo_instructions"),
    *("compile_cpu_s", "fits"),
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "small.py"
    file.write_text(
        "from depthjax.config import *\n"
        "def config():\n"
        "    return Config(\n"
        "        model=ModelConfig(shape='custom', layers=2, width=32, heads=2, mlp_width=48,\n"
        "                          context=64, vocab=300, dtype='float32'),\n"
        "        train=TrainConfig(steps=3, batch=8),\n"
        "    )\n"
    )
    return str(file)


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(["plan", *arguments])
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


@pytest.mark.jax_version
def test_a_plan_compiles_whatever_is_in_the_cache(tmp_path):
    """Seconds are the compiler's, and nothing is kept that could not be loaded again."""
    found, folder = topology.target("cpu"), jax.config.jax_compilation_cache_dir
    program = jax.jit(lambda x: jnp.sin(x) + x).lower(jnp.ones(3))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    try:
        compile_lowered(program, found, {})
        assert list(tmp_path.iterdir()) == []
        jax.jit(jnp.tan).lower(jnp.ones(3)).compile()
        assert list(tmp_path.iterdir()) != []
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()


def test_one_plan(capsys, config):
    status, out, err = run(capsys, config, "--topology", "cpu:4", "--json", "plan.json")
    assert status == 0, err
    for text in ("activations, temporaries", "counted", "formula", "all-reduce over data"):
        assert text in out
    assert max(map(len, out.splitlines())) <= 80
    assert "compiling pre_ln" in err
    (entry,) = json.loads(pathlib.Path("plan.json").read_text())["entries"]
    assert set(entry) >= KEYS
    assert entry["devices"] == 4
    parameters = 2 * 300 * 32 + 2 * (4 * 32**2 + 3 * 32 * 48) + 5 * 32
    assert entry["parameters"] == parameters
    assert entry["parameter_bytes"] == 4 * parameters
    assert entry["optimizer_bytes"] == 8 * parameters
    # Parameters, two moments, three counters and one of Adam's, and two of the eight sequences.
    assert entry["argument_bytes"] == pytest.approx(12 * parameters + 16 + 2 * 64 * 4, abs=16)
    # A ring of 4 sends 1.5 bytes a byte of fp32 gradient, and little else.
    assert entry["collective_bytes"] == pytest.approx(1.5 * 4 * parameters, rel=0.01)
    attention = 2 * 4 * 64 * 32  # the whole square, both layers, a token
    products = 2 * (parameters - 300 * 32 - 5 * 32)
    assert entry["flops_formula"] == 3 * 2 * 64 * (products + attention // 2)
    # Whole squares; 63 of 64 positions have logits.
    executed = 3 * 2 * (64 * (products + attention) - 2 * 300 * 32)
    assert entry["flops_compiled"] == pytest.approx(executed, rel=0.01)
    assert entry["fits"] is True


def test_a_comparison(capsys, config):
    names = "pre_ln,block_attnres"
    arguments = ("--compare", names, "--json", "f.json", "--prefill", "128", "--effort", "O0")
    status, out, err = run(capsys, config, *arguments)
    assert status == 0, err
    entries = json.loads(pathlib.Path("f.json").read_text())["entries"]
    assert [entry["variant"] for entry in entries] == names.split(",")
    assert entries[0]["program"] == "prefill of 128 tokens"
    assert "1.00x" in out
    assert "picture: plan.png" in out
    assert pathlib.Path("plan.png").read_bytes().startswith(b"\x89PNG")
    # Forward alone, of one sequence, logits of one position.
    attention, products = 2 * 4 * 128 * 32, 2 * 2 * (4 * 32**2 + 3 * 32 * 48)
    assert entries[0]["flops_compiled"] == 128 * (products + attention) + 2 * 32 * 300


@pytest.mark.jax_version
def test_a_decode_step(capsys, config):
    """Of two sequences a device, whose cache is written in place."""
    arguments = ("--decode", "2x4096", "--topology", "cpu:2", "--json", "f.json", "--effort", "O0")
    status, out, err = run(capsys, config, *arguments)
    assert status == 0, err
    for text in ("decode step after 4,096 tokens", "keys and values", "HBM traffic a token"):
        assert text in out
    (entry,) = json.loads(pathlib.Path("f.json").read_text())["entries"]
    cache = 2 * 2 * 2 * 4096 * 32 * 4
    assert (entry["sequences"], entry["tokens"], entry["cache_bytes"]) == (4, 1, cache)
    assert entry["optimizer_bytes"] == 0
    assert entry["argument_bytes"] == pytest.approx(entry["parameter_bytes"] + cache, rel=0.01)
    assert entry["hbm_bytes_per_token"] == entry["hbm_bytes"] / 2
    assert entry["temp_bytes"] < 0.75 * cache  # one of the two layers, but no second cache
    products = 2 * (4 * 32**2 + 3 * 32 * 48) + 32 * 300
    assert entry["flops_formula"] == 2 * (2 * products + 2 * 4 * 4096 * 32)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prefill", "64", "--chunk", "0"], ["chunk is '0'", "1 to 64"]),
        (["--prefill", "64", "--chunk", "65"], ["chunk is '65'", "1 to 64"]),
        (["--chunk", "5"], ["chunk is '5'", "--prefill"]),
        (["--topology", "2xh100:8"], ["2xh100:8", "only TPUs", "h100:8"]),
        (["--topology", "v9:2x2"], ["topology", "v9:2x2", "v5p:4x4x4", "h100:8", "cpu"]),
        (["--topology", "v5p:4x4"], ["topology", "v5p:4x4", "v5p:4x4x4"]),
        (["--topology", "h100"], ["topology", "h100:8"]),
        (["--topology", "v5e:100x100"], ["topology", "v5e:100x100", "16", "v5e:4x4"]),
        (["--mesh", "fsdp=4"], ["mesh", "fsdp=4", "4 devices of the 1", "--mesh data=1"]),
        (["--mesh", "data=3"], ["mesh", "data=3", "--mesh data=1"]),
        (["--mesh", "four"], ["mesh", "four", "data=2,fsdp=4"]),
        (["--compare", "pre_ln,nonsense"], ["compare", "nonsense", "pre_ln"]),
        (["--compare", "pre_ln,pre_ln"], ["compare", "once"]),
        (["--decode", "many"], ["decode", "many", "16x2048"]),
        (["--decode", "0x8"], ["decode", "0x8", "16x2048"]),
        (["--decode", "8", "--prefill", "8"], ["decode", "prefill", "both"]),
        (["--prefill", "many"], ["prefill", "many", "number"]),
        (["--prefill", "²"], ["prefill", "²", "number"]),
        (["--compare", "pre_ln,"], ["compare", "pre_ln,", "commas"]),
        (["--json", "."], ["json", "'.'", "file"]),
        (["--picture", "plan.xyz"], ["picture", "plan.xyz", ".png"]),
        (["--effort", "O7"], ["effort", "O7", "O0"]),
        (["--json", "no/such/f.json"], ["json", "no/such/f.json"]),
        (["--topology", ""], ["topology is ''", "v5p:4x4x4"]),
        (["--topolgy", "cpu"], ["--topology"]),
        (["--topology"], ["--topology needs a value"]),
        (["--topology", "cpu:3"], ["train.batch", "8", "3 devices"]),
        (["--model.shapes", "x"], ["model.shapes", "model.shape"]),
        (["--model.residual", "nonsense"], ["model.residual", "nonsense"]),
    ],
)
def test_bad_input_is_one_sentence_before_compiling(capsys, config, monkeypatch, arguments, words):
    monkeypatch.setattr("depthjax.aot.entry.make_entry", None)  # nothing may be compiled
    status, _, err = run(capsys, config, *arguments)
    assert status == 2
    assert err.startswith("depthjax: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_missing_config_and_help(capsys):
    status, _, err = run(capsys)
    assert (status, err.count("\n")) == (2, 1)
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert "--topology" in out


@pytest.mark.parametrize(
    ("name", "package"), [("v5p:4x4x4", "depthjax[plan]"), ("h100:8", "depthjax[plan-cuda]")]
)
def test_missing_compilers_say_what_to_install(monkeypatch, name, package):
    find = importlib.util.find_spec
    absent = ("libtpu", "jax_plugins")
    monkeypatch.setattr(
        topology.importlib.util, "find_spec", lambda n, *a: None if n in absent else find(n, *a)
    )
    with pytest.raises(InputError, match="not installed: pip install") as error:
        topology.target(name)
    assert package in str(error.value)
    assert name in str(error.value)


def test_what_would_help():
    """60 bytes of temporaries grow with the batch. Nothing is recomputed, a device has four
    sequences, and parameters are fp32."""
    held = TrainingBytes(10, 20, 10, 0, 0, 0)
    config = Config(train=TrainConfig(batch=8, accumulate=1))
    knobs = helpful_knobs(config, 2, held, 70, missing=20)
    assert [knob.change for knob in knobs] == ["--model.remat layer", "2 times as many devices (4)"]
    config = Config(model=ModelConfig(remat="layer"), train=TrainConfig(batch=8))
    knobs = helpful_knobs(config, 2, held, 70, missing=35)
    # A half of the batch frees 30 bytes, a quarter 45, of which a sum of gradients takes 10.
    assert [(knob.change, knob.saves) for knob in knobs] == [
        ("4 times as many devices (8)", 45),
        ("--train.accumulate 4", 35),
    ]


def entry(variant: str, **changes) -> Entry:
    figures = {
        "variant": variant,
        "shape": "backbone-300m-L84",
        "topology": "v5p:16x16x16",
        "devices": 4096,
        "program": "training step",
        "sequences": 65536,
        "tokens": 131072,
        "parameters": 10**12,
        "parameter_bytes": 4 * 10**12,
        "optimizer_bytes": 8 * 10**12,
        "cache_bytes": 2 * 10**12,
        "history_bytes": 0,
        "argument_bytes": 12 * 10**12,
        "temp_bytes": 999 * 10**9,
        "peak_bytes": 13 * 10**12,
        "capacity_bytes": 95 * 2**30,
        "fits": False,
        "hbm_bytes": 123.4e15,
        "flops_compiled": 987.6e18,
        "flops_formula": 987.6e18,
        "collective_bytes": 1e15,
        "collectives": [Collective("collective-permute", "data+tensor", 4096, 1e6, 1e15, 1e15)],
        "hlo_instructions": 123456,
        "compile_cpu_s": 12345.6,
        "seconds": {"compute": 1234.5, "memory": 2345.6, "links": 0.001},
        "mfu_ceiling": 0.123,
        "largest_buffers": [Buffer("bf16[140,8,131072,16384]", 2**40, "while/broadcast_in_dim")],
        "knobs": [],
        "grades": GRADES,
        "notes": [
            "a note that is long enough to need a second line, as some of them are in practice"
        ],
    }
    return Entry(**{**figures, **changes})


def test_tables_fit_80_columns(capsys):
    from rich.console import Console

    console = Console(width=100, markup=False)
    none = dict.fromkeys(("hbm_bytes", "flops_compiled", "collective_bytes", "argument_bytes"))
    failed = entry("post_ln_moda", **none, seconds={}, mfu_ceiling=None, hlo_instructions=None)
    print_entry(entry("full_attnres"), console)
    print_entry(failed, console)
    print_comparison([entry("pre_ln"), entry("block_attnres"), failed], console)
    out = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80
    assert "…" not in out
    assert "does not fit: 12012.19 GiB too much" in out


def test_numbers_as_people_write_them():
    assert (big(0, "B"), big(1234, "B"), big(51.63e12, "FLOP")) == ("0 B", "1.23 kB", "51.6 TFLOP")
    assert big(999.6e9, "B") == "1.00 TB"
    assert (duration(0.2705), duration(2.6151), duration(4.57e-6)) == (
        "270 ms",
        "2.62 s",
        "4.57 us",
    )
    assert (gib(2**31), gib(2**20 * 1.5), gib(None)) == ("2.00 GiB", "1.5 MiB", "?")
