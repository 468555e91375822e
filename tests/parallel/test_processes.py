"""A job of several processes: how it starts, stops, is killed, and continues elsewhere."""

import dataclasses
import json
import signal
import time

import jax
import numpy as np
import pytest
from jobs import Job

from depthjax.config import load_config
from depthjax.errors import InputError
from depthjax.parallel import processes
from depthjax.train import train
from depthjax.train.stop import StopSignal

pytestmark = pytest.mark.jax_version


def summary_of(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def same_curve(losses, reference):
    """Equal up to the order in which devices add their gradients."""
    assert losses.keys() == reference.keys()
    steps = sorted(reference)
    np.testing.assert_allclose([losses[s] for s in steps], [reference[s] for s in steps], rtol=2e-4)


def test_two_processes_are_one_run(config_file, tmp_path):
    """SIGTERM on either stops both at one step, the work saved; run again, they end where eight
    devices of one process do. One writes, and the run says how many there were."""
    job = Job(config_file, tmp_path / "two", count=2, devices=2)
    job.wait_for_step(5)
    job.processes[1].send_signal(signal.SIGTERM)
    output = job.finish()
    stopped_at = max(job.losses())
    assert f"stopped at step {stopped_at} of 20" in output
    assert "in 2 processes" in output
    job = Job(config_file, tmp_path / "two", count=2, devices=2)
    assert f"resuming at step {stopped_at}" in job.finish()
    summary = summary_of(tmp_path / "two")
    assert (summary["steps"], summary["resumed_from"]) == (20, [stopped_at])
    environment = json.loads((tmp_path / "two" / "environment.json").read_text())
    assert (environment["processes"], environment["devices"]) == (2, 4)

    config = load_config(str(config_file))
    alone = dataclasses.replace(config.run, dir=str(tmp_path / "one"))
    reference, _ = train(dataclasses.replace(config, run=alone))
    records = (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()
    same_curve(
        job.losses(), {r["step"]: r["loss"] for r in map(json.loads, records) if "loss" in r}
    )
    for name in ("heldout_loss", "heldout_loss_authors", "heldout_unigram_loss"):
        assert summary[name] == pytest.approx(reference[name], rel=2e-4)


@pytest.mark.proof
@pytest.mark.parametrize(("count", "victim"), [(2, 0), (2, 1), (4, 2)])
def test_a_killed_process_ends_the_job_and_costs_nothing(config_file, tmp_path, count, victim):
    """Within 60 s, in words; run again, the parameters end bit for bit as if nothing had been."""
    whole = Job(config_file, tmp_path / "whole", count, devices=2)
    whole.finish()
    job = Job(config_file, tmp_path / "killed", count, devices=2)
    job.wait_for_step(10)
    job.processes[victim].kill()
    began = time.monotonic()
    ended = job.end(60)
    print(f"ended {time.monotonic() - began:.1f} s after the kill")
    for index, (status, text) in enumerate(ended):
        if index != victim:
            assert status not in (0, -signal.SIGKILL), text
    words = "".join(text for index, (_, text) in enumerate(ended) if index != victim)
    noticed = "another process of the job is gone" in words  # by the next message between devices
    assert noticed == ("run the same command again to continue" in words)
    assert noticed or "another task died" in words  # by jax's heartbeats, in jax's words
    again = Job(config_file, tmp_path / "killed", count, devices=2)
    assert "resuming at step 8 of 20" in again.finish()
    for name in ("parameters_sha256", "heldout_loss", "train_loss"):
        assert summary_of(tmp_path / "killed")[name] == summary_of(tmp_path / "whole")[name]
    assert again.losses() == whole.losses()


@pytest.mark.proof
def test_another_number_of_processes_and_devices_continues(config_file, tmp_path):
    """From the checkpoint of four processes of two devices: one of eight, and two of one."""
    import shutil

    job = Job(config_file, tmp_path / "4x2", count=4, devices=2)
    job.wait_for_step(10)
    job.processes[3].send_signal(signal.SIGTERM)
    job.finish()
    for count, devices in [(1, 8), (2, 1)]:
        shutil.copytree(tmp_path / "4x2", tmp_path / f"{count}x{devices}")
    reference = Job(config_file, tmp_path / "4x2", count=4, devices=2)
    reference.finish()
    for count, devices in [(1, 8), (2, 1)]:
        other = Job(config_file, tmp_path / f"{count}x{devices}", count, devices)
        assert "resuming at step" in other.finish()
        same_curve(other.losses(), reference.losses())


@pytest.fixture
def environment(monkeypatch):
    """Sets what a launcher would; jax is told, and does nothing."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: calls.append(given))

    def given(**variables: str):
        for name in ("JAX_COORDINATOR_ADDRESS", processes.COUNT, processes.INDEX):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return calls

    return given


def test_one_process_needs_no_others(environment):
    for variables in ({}, {processes.COUNT: "1"}):
        assert environment(**variables) == []
        assert not processes.join()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({processes.COUNT: "two"}, "DEPTHJAX_PROCESSES is 'two': give the number of processes"),
        ({processes.COUNT: "0"}, "DEPTHJAX_PROCESSES is '0': give the number"),
        (
            {processes.COUNT: "4", processes.INDEX: "4"},
            "DEPTHJAX_PROCESS_ID is 4: with DEPTHJAX_PROCESSES 4 give 0 to 3",
        ),
        (
            {processes.COUNT: "4", processes.INDEX: "3"},
            "DEPTHJAX_PROCESS_ID is 3, but JAX_COORDINATOR_ADDRESS is '': give host:port of",
        ),
        (
            {processes.COUNT: "4", processes.INDEX: "3", "JAX_COORDINATOR_ADDRESS": "host"},
            "DEPTHJAX_PROCESS_ID is 3, but JAX_COORDINATOR_ADDRESS is 'host': give host:port of",
        ),
        ({processes.COUNT: "4"}, "DEPTHJAX_PROCESSES is 4, but jax found 1: start as many"),
    ],
)
def test_what_a_launcher_says_wrongly(environment, variables, message):
    environment(**variables)
    with pytest.raises(InputError) as error:
        processes.join()
    assert str(error.value).startswith(message)


def test_no_launcher(environment, monkeypatch):
    """jax's own complaint, and the remedy."""
    environment(**{processes.COUNT: "2"})
    monkeypatch.undo()
    monkeypatch.setenv(processes.COUNT, "2")
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)
    with pytest.raises(InputError, match=r"knows no launcher here .*set JAX_COORDINATOR_ADDRESS"):
        processes.join()


@pytest.mark.proof
def test_a_process_that_cannot_start_ends_the_others_in_words(config_file, tmp_path):
    """One machine lacks the text that the others have."""
    file = tmp_path / "file"
    file.touch()
    own = {1: {"DEPTHJAX_CACHE": str(file)}}
    ended = Job(config_file, tmp_path / "run", count=2, devices=1, own=own).end()
    assert [status for status, _ in ended] == [2, 2]
    assert "depthjax, process 0 of 2: another process of the job cannot start" in ended[0][1]
    assert f"depthjax, process 1 of 2: {file}" in ended[1][1]


class Divided:
    """A sharding of which this process holds these rows."""

    def __init__(self, *ranges):
        self.ranges = ranges

    def addressable_devices_indices_map(self, shape):
        return {number: (slice(*ends),) for number, ends in enumerate(self.ranges)}


@pytest.mark.parametrize(
    ("ranges", "rows"),
    [
        ([(0, 2), (2, 4)], [0, 1, 2, 3]),
        ([(6, 8), (2, 4)], [2, 3, 6, 7]),
        ([(4, 8), (4, 8)], [4, 5, 6, 7]),
        ([(None, None)], list(range(8))),
    ],
)
def test_rows_of_a_process(ranges, rows):
    """In the order in which jax takes them up; devices that hold the same rows count once."""
    assert processes.rows_here(Divided(*ranges), 8).tolist() == rows


def test_a_status_to_stop_with_is_one(monkeypatch):
    """Known before training starts, not when its work is to be saved."""
    for text, wanted in (("75", 75), ("", 0)):
        monkeypatch.setenv("DEPTHJAX_STOP_STATUS", text)
        assert StopSignal(print).exit_status == wanted
    for text in ("abc", "256", "-1"):
        monkeypatch.setenv("DEPTHJAX_STOP_STATUS", text)
        with pytest.raises(InputError, match=f"DEPTHJAX_STOP_STATUS is '{text}'"):
            StopSignal(print)
