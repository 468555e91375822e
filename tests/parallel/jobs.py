"""Training jobs of several processes on this machine, as a launcher would start them."""

import os
import pathlib
import socket
import subprocess
import sys
import time

from depthjax.train.metrics import read_jsonl

CONFIG = """
from depthjax.config import Config, DataConfig, ModelConfig, RunConfig, TrainConfig
from depthjax.residuals import BlockAttnRes

def config():
    return Config(
        model=ModelConfig(
            shape="custom", layers=2, width=32, heads=2, mlp_width=48, context=32, dtype="float32",
            residual=BlockAttnRes(block_size_sublayers=3),
        ),
        data=DataConfig(tokenizer="bpe8k"),
        train=TrainConfig(steps=20, batch=8, peak_lr=0.01),
        run=RunConfig(log_every=1, save_every=4, eval_every=0, eval_batches=1),
    )
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Job:
    """`depthjax train` in `count` processes of `devices` CPU devices each.

    own: environment variables of single processes, by their index.
    """

    def __init__(
        self,
        config: pathlib.Path,
        run_dir: pathlib.Path,
        count: int,
        devices: int,
        own: dict[int, dict[str, str]] | None = None,
    ):
        self.run_dir = run_dir
        shared = {"DEPTHJAX_PROCESSES": str(count), "JAX_NUM_CPU_DEVICES": str(devices)}
        shared |= {"JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}"}
        command = [sys.executable, "-m", "depthjax", "train", str(config)]
        self.processes = [
            subprocess.Popen(
                [*command, "--run.dir", str(run_dir)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={
                    **os.environ,
                    **shared,
                    "DEPTHJAX_PROCESS_ID": str(index),
                    **(own or {}).get(index, {}),
                },
            )
            for index in range(count)
        ]

    def losses(self) -> dict[int, float]:
        """Training losses by step, as far as they are logged."""
        records = read_jsonl(self.run_dir / "metrics.jsonl")
        return {r["step"]: r["loss"] for r in records if "loss" in r}

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 900
        while time.monotonic() < deadline:
            if max(self.losses(), default=0) >= step:
                return
            for process in self.processes:
                assert process.poll() is None, self.end()
            time.sleep(0.005)
        raise AssertionError(f"step {step} was never logged")

    def end(self, seconds: float = 900) -> list[tuple[int, str]]:
        """(status, output) of each process; none outlives this."""
        deadline = time.monotonic() + seconds
        try:
            outputs = [
                p.communicate(timeout=deadline - time.monotonic())[0] for p in self.processes
            ]
        finally:
            for process in self.processes:
                process.kill()
        return [(p.returncode, text) for p, text in zip(self.processes, outputs, strict=True)]

    def finish(self) -> str:
        """What the first process printed in a job that must end well; the others are silent."""
        ended = self.end()
        assert [status for status, _ in ended] == [0] * len(ended), ended
        for _, text in ended[1:]:
            assert "loss" not in text, text
            assert "Traceback" not in text, text
        return ended[0][1]
