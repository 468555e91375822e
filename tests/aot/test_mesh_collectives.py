"""What a training step sends on a pod, in the program that a TPU's compiler makes."""

import math

import pytest
from test_plan_targets import described

from depthjax.aot.compile import compile_lowered, effort_options, lower_training
from depthjax.aot.topology import devices_of
from depthjax.config import Config, MeshConfig, ModelConfig, TrainConfig
from depthjax.parallel import make_mesh
from depthjax.plan.hlo import parse
from depthjax.plan.hlo_collectives import collectives
from depthjax.residuals import BlockAttnRes, PreLN

pytestmark = [pytest.mark.plan, pytest.mark.filterwarnings("ignore")]  # of what compilers load

LAYERS, WIDTH, LENGTH, BATCH, VOCAB = 8, 1024, 2048, 16, 32768
TENSOR, FSDP = 4, 4


def sent(residual):
    """Collectives of a step on a v5e pod of 16."""
    found, _ = described("v5e:4x4")
    model = ModelConfig(
        shape="custom",
        layers=LAYERS,
        width=WIDTH,
        heads=16,
        mlp_width=2816,
        context=LENGTH,
        vocab=VOCAB,
        residual=residual,
    )
    mesh = MeshConfig(fsdp=FSDP, tensor=TENSOR)
    config = Config(model=model, train=TrainConfig(batch=BATCH), mesh=mesh).check()
    made = make_mesh(config, devices_of(found))
    lowered = lower_training(config, VOCAB, made)
    executable = compile_lowered(lowered, found, effort_options("O0", "tpu")).executable
    return collectives(parse(executable.as_text()), dict(made.shape))


def test_collectives_of_a_step():
    """Over `tensor`: a reduce-scatter behind each branch and its mirror image, and one behind the
    embedding; gathers in front of each branch, once more for its matrices' gradients, and their
    mirror images. No sum that all devices keep is of a size that grows with the tokens."""
    plain, block = sent(PreLN()), sent(BlockAttnRes())
    stream = BATCH // FSDP * LENGTH * WIDTH * 2  # bytes of bf16 that a branch takes
    scattered = [c for c in plain if (c.kind, c.axes) == ("reduce-scatter", "tensor")]
    assert sum(c.count for c in scattered) == 4 * LAYERS + 1
    assert sum(c.payload for c in scattered) == (4 * LAYERS + 1) * stream
    gathered = [c for c in plain if (c.kind, c.axes) == ("all-gather", "tensor")]
    assert sum(c.count for c in gathered) == 6 * LAYERS + 3
    for found in (plain, block):
        assert all(c.payload / c.count < stream / 8 for c in found if c.kind == "all-reduce")
    for axis in ("tensor", "fsdp"):
        total = [math.fsum(c.sent for c in f if axis in c.axes.split("+")) for f in (plain, block)]
        assert total[0] <= total[1] <= 1.02 * total[0]
