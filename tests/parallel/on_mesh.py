"""A small model on any mesh, and the losses and gradient norms of its first steps."""

import jax
import numpy as np

from depthjax.config import Config, MeshConfig, ModelConfig, TrainConfig
from depthjax.parallel import make_mesh
from depthjax.train.step import Program

VOCAB = 64


def small(residual, **sizes) -> Config:
    model = ModelConfig(
        shape="custom",
        layers=4,
        width=32,
        heads=4,
        mlp_width=48,
        context=16,
        dtype="float32",
        residual=residual,
    )
    train = TrainConfig(batch=8, steps=10, warmup_steps=1)
    return Config(model=model, train=train, mesh=MeshConfig(**sizes)).check()


def program_of(config: Config, devices: int = 8) -> Program:
    return Program(config, VOCAB, make_mesh(config, jax.devices()[:devices]))


def steps(program: Program, state, numbers=range(3)):
    """(state, [steps, 2]: loss and gradient norm of each step, by the number of its batch)."""
    seen = []
    for number in numbers:
        ids = np.random.default_rng(number).integers(0, VOCAB, (8, 16), np.int32)
        state, metrics = program.step(state, program.put(ids))
        seen.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return state, np.array(seen)
