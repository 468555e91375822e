"""The command line as a user meets it: what it prints, and what it says of bad input."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from depthjax.cli import main


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Each command runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def signals():
    """A command that is run within this process leaves no handler of its own behind."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    old = os.environ.get("DEPTHJAX_CACHE")
    os.environ["DEPTHJAX_CACHE"] = old or str(tmp_path_factory.mktemp("cache"))
    yield
    if old is None:
        del os.environ["DEPTHJAX_CACHE"]


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "small.py"
    file.write_text(
        "from depthjax.config import *\n"
        "def config():\n"
        "    return Config(\n"
        "        model=ModelConfig(shape='custom', layers=2, width=32, heads=2, mlp_width=48,\n"
        "                          context=32, dtype='float32'),\n"
        "        data=DataConfig(tokenizer='bpe8k'),\n"
        "        train=TrainConfig(steps=3, batch=8),\n"
        "        run=RunConfig(dir='run', log_every=1, eval_batches=1),\n"
        "    )\n"
    )
    return str(file)


def run(capsys, *arguments):
    """(exit status, stdout, stderr) of a command in this process."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def assert_refused(result, *words):
    """Exit status 2 and one sentence on stderr that has all the words."""
    status, _, stderr = result
    assert status == 2, stderr
    assert stderr.startswith("depthjax: ")
    assert stderr.count("\n") == 1, stderr
    for word in words:
        assert word in stderr, stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--train.stepz", "3"], ["--train.stepz", "--train.steps"]),
        (["--model.resdiual", "pre_ln"], ["--model.resdiual", "--model.residual"]),
        (["--xyzzy", "3"], ["--xyzzy", "no known name"]),
        (["--train.steps", "many"], ["--train.steps", "many", "INT"]),
        (["--model.dtype", "float8"], ["--model.dtype", "float8", "bfloat16"]),
        (["--train.steps"], ["--train.steps"]),
        (["--model.shape"], ["--model.shape", "needs a value"]),
        (["stray"], ["stray", "--field value"]),
        (["--model.residual", "highway"], ["highway", "pre_ln"]),
        (["--model.heads", "5"], ["model.heads", "5", "model.width 32"]),
        (
            ["--model.residual=block_attnres", "--model.residual.block_size_sublayers=9"],
            ["block_size_sublayers is 9", "1 to 4"],
        ),
        (["--train.accumulate", "3"], ["train.batch is 8", "train.accumulate 3"]),
        (["--train.batch", "12"], ["data * fsdp = 8", "12 sequences", "data=4"]),
        (["--train.batch", "100000"], ["train.batch", "100000"]),
        (["--model.context", "1000000"], ["model.context", "1000000"]),
        (["--data.dir", "nowhere"], ["nowhere"]),
        (["--data.tokenizer", "gpt9"], ["gpt9"]),
        (["--model.vocab", "300"], ["300", "8191"]),
        (["--run.dir", "/proc/run"], ["run.dir", "/proc/run"]),
        (["--run.dir", "a[1]"], ["run.dir", "a[1]", "another directory"]),
        (["--run.dir="], ["run.dir is empty"]),
        (["--data.dir", ""], ["data.dir is empty"]),
        (["--train.steps", "99999999999999999999"], ["train.steps", "2^31"]),
        (["--model.residual.eps", "nan"], ["model.residual.eps", "nan"]),
        (["--run.dir", "small.py"], ["run.dir", "small.py"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_to_train(capsys, config, arguments, words):
    assert_refused(run(capsys, "train", config, *arguments), *words)
    assert not os.path.isdir("run/checkpoints") or not os.listdir("run/checkpoints")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["trian", "train"]),
        (["train"], ["config file"]),
        (["train", "missing.py"], ["missing.py", "does not exist"]),
        (["eval"], ["run directory"]),
        (["eval", "nothing"], ["nothing"]),
        (["generate"], ["run directory"]),
        (["generate", "nothing", "--prompt", "a"], ["nothing", "no run directory"]),
        (["generate", "nothing"], ["prompt", "missing"]),
        (["generate", "nothing", "--promt", "a"], ["--promt", "--prompt"]),
        (["generate", "nothing", "--prompt", "a", "b"], ["'b'", "quotes"]),
        (["generate", "nothing", "--prompt", "a", "--tokens", "0"], ["tokens is '0'", "whole"]),
        (["generate", "nothing", "--prompt", "a", "--top_p", "x"], ["top_p is 'x'", "number"]),
        (["generate", "nothing", "--prompt", "a", "--seed", "-1"], ["seed is '-1'", "at least 0"]),
        (["data"], ["prepare"]),
        (["data", "prepaer"], ["prepaer", "prepare"]),
        (["data", "prepare", "nothing", "--out", "o"], ["nothing"]),
        (["data", "prepare", "."], ["--out"]),
        (["data", "prepare", "small.py", "--out", "o"], ["small.py", ".txt"]),
        (["data", "verify", "nothing"], ["nothing"]),
        (["data", "verify", ""], ["empty"]),
        (["data", "prepare", "", "--out", "o"], ["empty"]),
        (["data", "prepare", "small.py", "--out", "/proc/o"], ["small.py"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_bad_commands(capsys, config, arguments, words):
    assert_refused(run(capsys, *arguments), *words)


@pytest.mark.parametrize("error", [ConnectionError, RuntimeError])
def test_hub_that_cannot_be_reached(capsys, monkeypatch, error):
    def prepare(*arguments, **options):
        raise error("name resolution failed\nand a long story")

    monkeypatch.setattr("depthjax.cli_data.prepare", prepare)
    url = "hf://datasets/HuggingFaceFW/fineweb-edu/sample/100BT"
    result = run(capsys, "data", "prepare", url, "--out", "o")
    assert_refused(result, url, "name resolution failed", "same command again")


def test_cache_that_cannot_be_written(capsys, config, monkeypatch):
    monkeypatch.setenv("DEPTHJAX_CACHE", "/proc/nothing")
    assert_refused(run(capsys, "train", config), "/proc/nothing")


def test_brackets_in_paths_are_no_markup(capsys):
    write_texts()
    status, out, _ = run(
        capsys, "data", "prepare", "texts", "--out", "o[/b]", "--tokenizer", "bpe8k"
    )
    assert status == 0
    assert "o[/b]: 12 documents" in out


def test_empty_corpus(capsys):
    open("empty.jsonl", "w").close()
    assert_refused(run(capsys, "data", "prepare", "empty.jsonl", "--out", "o"), "empty.jsonl")


def write_texts(count=12):
    os.mkdir("texts")
    for i in range(count):
        with open(f"texts/{i:02}.txt", "w") as file:
            file.write(f"Text number {i}. " + "All work and no play makes a dull day. " * 40)


def test_own_text_from_files_to_a_trained_model(capsys, config):
    write_texts()
    status, out, _ = run(
        capsys, "data", "prepare", "texts", "--out", "shards", "--tokenizer", "bpe8k"
    )
    assert status == 0
    assert "12 documents" in out
    assert run(capsys, "data", "verify", "shards")[0] == 0
    assert run(capsys, "train", config, "--data.dir", "shards")[0] == 0
    status, out, _ = run(capsys, "eval", "run")
    assert status == 0
    assert "heldout_loss_authors" in out
    unknown = run(capsys, "eval", "run", "--model.context", "16")
    assert_refused(unknown, "another config", "model.context: 32 -> 16")


def test_text_is_continued(capsys, config):
    assert run(capsys, "train", config)[0] == 0
    prompt = ("generate", "run", "--prompt", "Fellow citizens — of")
    drawn = (*prompt, "--tokens", "12", "--top-k", "50", "--seed", "3")
    status, out, err = run(capsys, *drawn)
    assert status == 0, err
    assert out.startswith("Fellow citizens — of")
    assert out.endswith("\n")
    status, out, _ = run(capsys, "generate", "run", "--prompt=", "--tokens=2", "--temperature=0")
    assert (status, len(out) > 1) == (0, True)
    assert_refused(run(capsys, *prompt, "--tokens", "40"), "40 more", "32", "--tokens")
    assert_refused(run(capsys, *prompt, "--tokenizer", "neox"), "neox", "50280", "8192")


def test_characters_of_several_tokens_come_whole():
    from depthjax.cli_generate import pieces

    text = "déjà — 7 €"
    decode = lambda ids: bytes(ids).decode(errors="replace")  # noqa: E731
    assert list(pieces(text.encode(), decode)) == [*text, ""]
    assert list(pieces("é".encode()[:1], decode)) == ["\ufffd"]


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "id too large"])
def test_damaged_shards_are_refused(capsys, config, damage):
    write_texts()
    run(capsys, "data", "prepare", "texts", "--out", "shards", "--tokenizer", "bpe8k")
    shard = "shards/train-00000.npy"
    ids = np.fromfile(shard, "<u2")
    if damage == "flipped":
        ids[17] ^= 1
        ids.tofile(shard)
    elif damage == "truncated":
        ids[:-5].tofile(shard)
    elif damage == "missing":
        os.remove(shard)
    else:
        os.remove("shards/index.json")
        os.rename("shards/heldout-00000.npy", "shards/013_00008.npy")
        ids[17] = 60_000
        ids.tofile(shard)
    arguments = ["--data.dir", "shards"]
    if damage == "id too large":
        arguments += ["--data.tokenizer", "neox"]
    assert_refused(run(capsys, "train", config, *arguments), "train-00000.npy")
    assert not os.path.isdir("run/checkpoints") or not os.listdir("run/checkpoints")


def test_changed_config_lists_its_fields(capsys, config):
    assert run(capsys, "train", config)[0] == 0
    before = sorted(os.listdir("run/checkpoints"))
    changed = run(
        capsys, "train", config, "--model.width", "64", "--model.residual", "full_attnres"
    )
    assert_refused(
        changed, "model.width: 32 -> 64", "model.residual.name: 'pre_ln' -> 'full_attnres'"
    )
    assert sorted(os.listdir("run/checkpoints")) == before


def test_second_trainer_in_a_run_directory(capsys, config):
    from depthjax.train.run_dir import RunDirectory

    with RunDirectory("run"):
        assert_refused(run(capsys, "train", config), "run.dir is 'run'", "another process")


def test_divergence_is_one_sentence_with_status_1(capsys, config):
    status, _, stderr = run(
        capsys, "train", config, "--train.guard_norm=1e-6", "--train.guard_patience=2"
    )
    assert status == 1
    assert stderr.startswith("depthjax: 2 updates in a row were skipped")
    assert stderr.count("\n") == 1


def test_info(capsys, config):
    study = os.path.join(os.path.dirname(__file__), "..", "configs", "depthbench.py")
    arguments = ["--model.shape", "400m-L24", "--model.residual", "block_attnres"]
    status, out, _ = run(capsys, "info", study, *arguments)
    assert status == 0
    for fact in ("405,505,024", "1024", "2736", "7,969,177,600", "block_size_sublayers=6"):
        assert fact in out
    status, out, _ = run(capsys, "info")
    assert status == 0
    assert "400m-L70" in out
    assert "full_attnres" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["eval", "-h"],
        ["data", "prepare", "--help"],
        ["generate", "--help"],
    ],
)
def test_help(capsys, arguments):
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    assert len(out.splitlines()) > 10
    if arguments[0] in ("train", "eval"):
        assert "--train.peak_lr" in out
        assert "Learning rate at the end of the warmup" in out


def test_fields_may_be_spelt_with_hyphens_and_lower_case_values(capsys, config):
    from depthjax.config import load_config
    from depthjax.overrides import override

    arguments = ["--train.peak-lr=0.1", "--run.depth-sizes", "true", "--run.eval-batches", "none"]
    arguments += ["--run.dir", "none"]  # text stays as it is
    made = override(lambda shape, residual: load_config(config, shape, residual), arguments, "")
    assert (made.train.peak_lr, made.run.depth_sizes, made.run.eval_batches) == (0.1, True, None)
    assert made.run.dir == "none"


@pytest.mark.parametrize(
    "command", [["-m", "depthjax"], ["-c", "from depthjax.cli import main; main()"]]
)
def test_as_a_module(command):
    result = subprocess.run(
        [sys.executable, *command, "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith("depthjax 0.")
