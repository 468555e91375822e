"""A run as a user starts it: killed, stopped, resumed, diverging, and what it leaves behind."""

import json
import os
import pathlib
import random
import signal
import time

import numpy as np
import pytest
from changed import change

import depthjax.train.loop as loop
from depthjax.train import TrainingDiverged, train
from depthjax.train.metrics import json_numbers, read_jsonl

STEPS = 120


def finish(process) -> str:
    """The output of a process that must end well."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def summary_of(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def losses_of(run_dir):
    return [(r["step"], r["loss"]) for r in read_jsonl(run_dir / "metrics.jsonl") if "loss" in r]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, config_file):
    """The directory of a run that nothing disturbed, and what it printed."""
    import subprocess
    import sys

    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    command = [sys.executable, "-m", "depthjax", "train", str(config_file)]
    result = subprocess.run(
        [*command, "--run.dir", str(run_dir)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    return run_dir, result.stdout


def wait_for_step(process, run_dir, step):
    """Returns when the run has logged `step`."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        records = read_jsonl(run_dir / "metrics.jsonl")
        if records and records[-1]["step"] >= step:
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.002)
    raise AssertionError(f"step {step} was never logged")


def wait_for_save(process, run_dir):
    """Returns when a checkpoint is being written."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if any((run_dir / "checkpoints").glob("*tmp*")):
            return
        assert process.poll() is None, process.communicate()[0]
    raise AssertionError("no checkpoint was written")


@pytest.mark.jax_version
def test_what_a_run_leaves(uninterrupted):
    run_dir, output = uninterrupted
    summary = summary_of(run_dir)
    assert summary["steps"] == STEPS
    assert summary["tokens"] == STEPS * 8 * 32
    assert summary["resumed_from"] == []
    assert summary["skipped_updates"] == 0
    assert summary["heldout_loss_authors"] < summary["heldout_loss"] * 33 / 32
    assert len(summary["parameters_sha256"]) == 64
    assert f"{summary['heldout_unigram_loss']:.4f}" in output
    assert [step for step, _ in losses_of(run_dir)] == list(range(1, STEPS + 1))
    first, last = losses_of(run_dir)[0][1], summary["train_loss"]
    assert last < first - 1
    heldout = [r for r in read_jsonl(run_dir / "metrics.jsonl") if "heldout_loss" in r]
    assert [r["step"] for r in heldout] == [50, 100, STEPS]
    record = read_jsonl(run_dir / "metrics.jsonl")[0]
    expected = {"grad_norm", "learning_rate", "tokens_per_second", "data_wait_share"}
    assert expected | {"stream_rms", "gradient_rms"} <= record.keys()
    config = json.loads((run_dir / "config.json").read_text())
    assert config["model"]["residual"] == {
        "name": "block_attnres",
        "eps": 1e-6,
        "mix_eps": 1e-6,
        "logit_scale": False,
        "topk": None,
        "bias": False,
        "block_size_sublayers": 3,
        "two_phase": None,
    }
    assert "jax" in json.loads((run_dir / "environment.json").read_text())["packages"]
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.jax_version
def test_killed_at_any_moment_continues_bit_for_bit(uninterrupted, command, tmp_path):
    """Three kills at random steps and two in the middle of a save."""
    run_dir, seed = tmp_path / "run", random.randrange(1 << 30)
    chance = random.Random(seed)
    moments = sorted(chance.sample(range(2, STEPS - 10), 3))
    for moment in [moments[0], None, moments[1], None, moments[2]]:
        process = command(run_dir)
        if moment is None:
            wait_for_save(process, run_dir)
        else:
            wait_for_step(process, run_dir, moment)
        process.kill()
        process.communicate()
    finish(command(run_dir))
    summary, reference = summary_of(run_dir), summary_of(uninterrupted[0])
    for name in ("parameters_sha256", "heldout_loss", "heldout_loss_authors", "train_loss"):
        assert summary[name] == reference[name], f"seed {seed}: {name}"
    assert losses_of(run_dir) == losses_of(uninterrupted[0])
    assert summary["resumed_from"] == sorted(summary["resumed_from"])
    assert summary["resumed_from"], f"seed {seed}"


@pytest.mark.jax_version
def test_sigterm_saves_and_exits_0(uninterrupted, command, tmp_path):
    run_dir = tmp_path / "run"
    process = command(run_dir)
    wait_for_step(process, run_dir, 31)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    output = finish(process)
    assert time.monotonic() - began < 30
    stopped_at = losses_of(run_dir)[-1][0]
    assert f"stopped at step {stopped_at} of {STEPS}" in output
    assert f"resuming at step {stopped_at}" in finish(command(run_dir))
    summary = summary_of(run_dir)
    assert summary["resumed_from"] == [stopped_at]
    assert summary["parameters_sha256"] == summary_of(uninterrupted[0])["parameters_sha256"]


def test_signals_while_compiling(command, tmp_path):
    """There is nothing to save yet, and compilation does not delay the exit."""
    for number, status in ((signal.SIGTERM, 0), (signal.SIGINT, 130)):
        run_dir = tmp_path / number.name
        process = command(run_dir)
        while not (run_dir / "config.json").exists():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        process.send_signal(number)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == status, output


@pytest.mark.parametrize("seconds", [0.15, 0.4, 0.8, 1.4])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signals_while_starting(command, tmp_path, seconds, number, status):
    """During imports and preparation, too, a signal ends the process at once: none is lost."""
    process = command(tmp_path / "run")
    time.sleep(seconds)
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert not (tmp_path / "run" / "summary.json").exists()
    if process.returncode != -number:  # else it was not even in our own code yet
        assert process.returncode == status
        assert "Traceback" not in output


def test_a_finished_run_reports_again_and_trains_no_more(uninterrupted, command, tmp_path):
    run_dir, _ = uninterrupted
    before = summary_of(run_dir)
    output = finish(command(run_dir))
    after = summary_of(run_dir)
    assert f"{before['heldout_loss']:.4f}" in output
    assert {**before, "seconds": 0} == {**after, "seconds": 0}


@pytest.mark.jax_version
def test_half_written_newest_checkpoint(small_config):
    """The run continues from the one before, says so, and ends where it would have."""
    config = change(small_config, run={"keep": 3})
    reference, _ = train(config)
    checkpoints = pathlib.Path(config.run.dir) / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"4", "8", "12"}
    for path in (checkpoints / "12" / "state").rglob("*"):
        if path.is_file():
            os.truncate(path, 7)
    again, _ = train(config)
    assert again["parameters_sha256"] == reference["parameters_sha256"]
    assert again["resumed_from"] == [8]


def test_training_further_than_planned(small_config):
    """More steps than the checkpoint knew of: allowed, and said."""
    train(change(small_config, train={"steps": 4}))
    summary, _ = train(change(small_config, train={"steps": 8}))
    assert (summary["steps"], summary["resumed_from"]) == (8, [4])


class Faulty(loop.Program):
    """A program whose updates are skipped at the given calls, as the guard would do it."""

    bad: frozenset[int] = frozenset()

    def __init__(self, *arguments):
        super().__init__(*arguments)
        good, self.calls = self.step, 0

        def step(state, batch):
            self.calls += 1
            if self.calls not in self.bad:
                return good(state, batch)
            in_row = state.skipped_in_row + 1
            state = state._replace(
                step=state.step + 1, skipped=state.skipped + 1, skipped_in_row=in_row
            )
            metrics = dict.fromkeys(("loss", "grad_norm", "learning_rate"), 0.0)
            counts = {"skipped": np.array(state.skipped), "skipped_in_row": np.array(in_row)}
            return state, metrics | counts

        self.step = step


@pytest.mark.parametrize(
    ("bad", "rollbacks", "skipped"),
    [({6}, 0, 1), ({6, 7, 9, 10}, 0, 4), ({6, 7, 8}, 1, 0), ({6, 7, 8, 13, 14}, 1, 2)],
)
def test_rolls_back_once(small_config, monkeypatch, bad, rollbacks, skipped):
    """Three skips in a row return to the checkpoint of step 4, counters and all; the data go on.
    Fewer, or interrupted rows, do not."""
    monkeypatch.setattr(Faulty, "bad", frozenset(bad))
    monkeypatch.setattr(loop, "Program", Faulty)
    summary, _ = train(change(small_config, train={"guard_patience": 3}))
    assert (summary["rollbacks"], summary["skipped_updates"]) == (rollbacks, skipped)
    assert summary["steps"] == 12
    steps = [step for step, _ in losses_of(pathlib.Path(small_config.run.dir))]
    assert steps == list(range(1, 13))


@pytest.mark.parametrize("moment", [6, 7, 8, 9])
def test_stopping_among_skipped_updates_changes_nothing(small_config, monkeypatch, moment):
    """Steps 6 to 8 fail their first time, as the same data would; a stop at any of them, and a
    rerun, end where the undisturbed run does."""

    class Stopping(Faulty):
        """Fails by the position in the data, and asks to stop after one step of the first run."""

        stop_at: int | None = None

        def __init__(self, *arguments):
            super().__init__(*arguments)
            skipping, seen = self.step, set()

            def step(state, batch):
                key = np.asarray(batch).tobytes()
                position = order.setdefault(key, len(order) + 1)
                self.calls = position - 1
                seen.add(position)
                if position == Stopping.stop_at:
                    Stopping.stop_at = None
                    signal.raise_signal(signal.SIGTERM)
                return skipping(state, batch)

            self.step = step

    order: dict[bytes, int] = {}
    monkeypatch.setattr(Faulty, "bad", frozenset({6, 7, 8}))
    monkeypatch.setattr(loop, "Program", Stopping)
    config = change(small_config, train={"guard_patience": 3})
    undisturbed, _ = train(change(config, run={"dir": config.run.dir + "-undisturbed"}))
    assert undisturbed["rollbacks"] == 1
    Stopping.stop_at = moment
    assert train(config) == (None, 0)
    again, _ = train(config)
    for name in ("parameters_sha256", "rollbacks", "skipped_updates"):
        assert again[name] == undisturbed[name]


def test_gives_up_when_it_recurs(small_config, monkeypatch):
    monkeypatch.setattr(Faulty, "bad", frozenset({6, 7, 8, 14, 15, 16}))
    monkeypatch.setattr(loop, "Program", Faulty)
    config = change(small_config, train={"guard_patience": 3, "steps": 30})
    with pytest.raises(TrainingDiverged, match="again after a return to a checkpoint"):
        train(config)


def test_gives_up_without_a_checkpoint(small_config):
    """Every gradient is above this limit."""
    config = change(small_config, train={"guard_norm": 1e-6, "guard_patience": 3})
    with pytest.raises(TrainingDiverged, match="no checkpoint to return to"):
        train(config)


def test_damaged_metrics_lines_are_left_out(small_config):
    """Whatever stands in the file, the records around it stay."""
    train(change(small_config, train={"steps": 4}))
    path = pathlib.Path(small_config.run.dir) / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(
        b"\n".join([lines[0], b"\xff garbage", b"7", b'{"loss": 1}', *lines[1:], b'{"st'])
    )
    summary, _ = train(change(small_config, train={"steps": 8}))
    assert summary["train_loss"] is not None
    assert [step for step, _ in losses_of(path.parent)] == list(range(1, 9))


def test_json_has_no_nan():
    numbers = {"a": float("nan"), "b": [1.0, float("inf")], "c": {"d": float("-inf")}, "e": 2}
    assert json_numbers(numbers) == {"a": None, "b": [1.0, None], "c": {"d": None}, "e": 2}


def test_tensorboard(small_config):
    from tensorboard_reader import scalars

    train(change(small_config, train={"steps": 3}, run={"tensorboard": True, "depth_sizes": True}))
    written = scalars(f"{small_config.run.dir}/tensorboard")
    logged = losses_of(pathlib.Path(small_config.run.dir))
    assert [step for step, _ in written["loss"]] == [1, 2, 3]
    for (_, a), (_, b) in zip(written["loss"], logged, strict=True):
        assert abs(a - b) < 1e-6 * abs(b)
    assert "stream_rms/2" in written
