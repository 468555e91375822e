"""A small real run: the embedded corpus, the bpe8k tokenizer, two layers."""

import os
import pathlib
import subprocess
import sys

import pytest

from depthjax.config import Config, DataConfig, ModelConfig, RunConfig, TrainConfig
from depthjax.residuals import BlockAttnRes

CONFIG_FILE = """
from depthjax.config import Config, DataConfig, ModelConfig, RunConfig, TrainConfig
from depthjax.residuals import BlockAttnRes

def config():
    return Config(
        model=ModelConfig(
            shape="custom", layers=2, width=32, heads=2, mlp_width=48, context=32, dtype="float32",
            residual=BlockAttnRes(block_size_sublayers=3),
        ),
        data=DataConfig(tokenizer="bpe8k"),
        train=TrainConfig(steps=120, batch=8),
        run=RunConfig(log_every=1, save_every=7, eval_every=50, eval_batches=2, depth_sizes=True),
    )
"""


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """One cache for the session, so that tokenizer and corpus are prepared once."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["DEPTHJAX_CACHE"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def config_file(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("config") / "small.py"
    path.write_text(CONFIG_FILE)
    return path


@pytest.fixture
def command(config_file):
    """Starts `depthjax train` on the small config as a process of its own."""

    def start(run_dir, *overrides: str) -> subprocess.Popen:
        arguments = ["train", str(config_file), "--run.dir", str(run_dir), *overrides]
        return subprocess.Popen(
            [sys.executable, "-m", "depthjax", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )

    return start


@pytest.fixture
def small_config(tmp_path) -> Config:
    """The same for use within the process, on its eight devices, with fewer steps."""
    return Config(
        model=ModelConfig(
            shape="custom",
            layers=2,
            width=32,
            heads=2,
            mlp_width=48,
            context=32,
            dtype="float32",
            residual=BlockAttnRes(block_size_sublayers=3),
        ),
        data=DataConfig(tokenizer="bpe8k"),
        train=TrainConfig(steps=12, batch=8),
        run=RunConfig(
            dir=str(tmp_path / "run"), log_every=1, save_every=4, eval_every=0, eval_batches=1
        ),
    )
