"""launch/slurm/train.sbatch on a SLURM cluster of this machine: submit, preempt, requeue, resume.

apt-get install -y slurm-wlm munge && pytest -m slurm
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import pytest

from depthjax.train.metrics import read_jsonl

ROOT = pathlib.Path(__file__).parent.parent.parent
CLUSTER = ROOT / "tests" / "launch" / "slurm_cluster.sh"
CONFIG = """
from depthjax.config import Config, DataConfig, ModelConfig, RunConfig, TrainConfig

def config():
    return Config(
        model=ModelConfig(
            shape="custom", layers=2, width=32, heads=2, mlp_width=48, context=32, dtype="float32"
        ),
        data=DataConfig(tokenizer="bpe8k"),
        train=TrainConfig(steps=300, batch=8),
        run=RunConfig(log_every=1, save_every=100, eval_every=0, eval_batches=1),
    )
"""

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(not shutil.which("slurmctld", path="/usr/sbin:/sbin"), reason="no SLURM"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Environment variables with which sbatch and its friends find the cluster."""
    folder = tmp_path_factory.mktemp("slurm")
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    environment = {**os.environ, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
    subprocess.run(["bash", CLUSTER, "start", folder], check=True, env=environment)
    yield environment
    subprocess.run(["bash", CLUSTER, "stop", folder], check=True, env=environment)


class Batch:
    """A job of two tasks of two CPU devices each, in the partition that is preempted."""

    def __init__(self, cluster: dict[str, str], folder: pathlib.Path, config: str = CONFIG):
        folder.mkdir()
        self.cluster, self.run_dir, self.log = cluster, folder / "run", folder / "log"
        file = folder / "config.py"
        file.write_text(config)
        devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
        devices |= {"RUN_DIR": str(self.run_dir), "DEPTHJAX_CACHE": str(folder / "cache")}
        options = ["--nodes", "1", "--ntasks", "2", "--output", str(self.log)]
        self.id = submit(
            {**cluster, **devices, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
            *options,
            str(ROOT / "launch" / "slurm" / "train.sbatch"),
            str(file),
        )

    def show(self, name: str) -> str:
        """A field of the job, such as JobState."""
        text = self._control("show", "job", self.id)
        return re.search(rf"\b{name}=(\S+)", text)[1]

    def hurry(self) -> None:
        """SLURM holds a requeued job back for two minutes."""
        self._control("update", f"jobid={self.id}", "starttime=now")

    def _control(self, *words: str) -> str:
        command = ["scontrol", *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, env=self.cluster
        ).stdout

    def wait_for_state(self, state: str, seconds: float = 600) -> None:
        wait(lambda: self.show("JobState") == state, seconds, self.log)

    def wait_for_step(self, step: int) -> None:
        def logged() -> bool:
            return any(r["step"] >= step for r in read_jsonl(self.run_dir / "metrics.jsonl"))

        wait(logged, 600, self.log)

    def summary(self) -> dict:
        return json.loads((self.run_dir / "summary.json").read_text())


def submit(environment: dict[str, str], *words: str) -> str:
    """The id of a new job."""
    done = subprocess.run(
        ["sbatch", "--parsable", *words],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=ROOT,
    )
    return done.stdout.strip()


def wait(condition, seconds: float, log: pathlib.Path) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
        time.sleep(0.5)


def test_preempted_requeued_resumed(cluster, tmp_path):
    """A job of the other partition takes the machine: within the grace the run is saved and back
    in the queue. Afterwards it goes on, and ends bit for bit where an undisturbed one does."""
    job = Batch(cluster, tmp_path / "disturbed")
    job.wait_for_step(5)
    sleeper = ["--output", "/dev/null", "--wrap", "sleep 3"]
    submit(cluster, "--partition", "high", "--exclusive", *sleeper)
    job.wait_for_state("PENDING", 90)
    assert "stopped, the work saved: back to the queue" in job.log.read_text()
    job.hurry()
    job.wait_for_state("COMPLETED")
    assert (job.show("ExitCode"), job.show("Restarts")) == ("0:0", "1")
    (stopped_at,) = job.summary()["resumed_from"]
    assert 5 <= stopped_at < 300
    assert f"resuming at step {stopped_at}" in job.log.read_text()
    whole = Batch(cluster, tmp_path / "whole")
    whole.wait_for_state("COMPLETED")
    assert whole.summary()["resumed_from"] == []
    assert whole.summary()["parameters_sha256"] == job.summary()["parameters_sha256"]


def test_bad_input_ends_the_job_with_its_status(cluster, tmp_path):
    """And does not return to the queue."""
    job = Batch(cluster, tmp_path / "bad", CONFIG.replace("batch=8", "batch=-8"))
    job.wait_for_state("FAILED", 120)
    assert (job.show("ExitCode"), job.show("Restarts")) == ("2:0", "0")
    assert "train.batch is -8: give 1 or more" in job.log.read_text()
