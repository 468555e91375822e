"""Depth kernels in the programs of an H100: `pytest -m plan`, with JAX's CUDA plugin."""

import pytest

from depthjax.aot.compile import Inference, compile_lowered, effort_options, lower
from depthjax.aot.topology import devices_of, prepare_environment, target
from depthjax.config import Config, ModelConfig, TrainConfig
from depthjax.errors import InputError
from depthjax.parallel import make_mesh
from depthjax.plan.hlo import parse
from depthjax.plan.hlo_buffers import copies
from depthjax.residuals import REGISTRY

pytestmark = [
    pytest.mark.plan,
    pytest.mark.filterwarnings("ignore"),  # of what compilers load
]
BATCH, LENGTH, WIDTH = 2, 256, 512


def compiled(name: str, inference: Inference | None = None, devices: int = 1):
    """The executable of a small model's program."""
    try:
        found = target(f"h100:{devices}")
    except InputError as error:
        pytest.skip(str(error))
    prepare_environment(found)
    sizes = {"layers": 12, "width": WIDTH, "heads": 8, "mlp_width": 1408, "context": LENGTH}
    model = ModelConfig(shape="custom", vocab=4096, residual=REGISTRY[name](), **sizes)
    config = Config(model=model, train=TrainConfig(batch=BATCH * devices)).check()
    mesh = make_mesh(config, devices_of(found))
    lowered = lower(config, 4096, mesh, inference)
    return compile_lowered(lowered, found, effort_options("O0", "gpu")).executable


def launches(executable) -> int:
    return executable.as_text().count('custom_call_target="mosaic_gpu_v2"')


@pytest.mark.parametrize(("name", "kernels"), [("block_attnres", 8), ("full_attnres", 9)])
@pytest.mark.parametrize("devices", [1, 2])
def test_training_runs_the_kernels_and_copies_no_history(name, kernels, devices):
    """Of Block: the two readers of a layer forward, again and backward, and the final one. Of Full:
    the two forward, gathering and mixing again, the final one twice, the embedding's gathering."""
    executable = compiled(name, devices=devices)
    assert launches(executable) == kernels
    row = 2 * BATCH * LENGTH * WIDTH
    found = copies(parse(executable.as_text()), at_least=4 * row)
    assert [c.shape for c in found if c.shape[-1] in (WIDTH, 128)] == []


@pytest.mark.parametrize("name", ["hc", "mhc"])
@pytest.mark.parametrize("devices", [1, 2])
def test_training_reads_streams_in_kernels_and_copies_none(name, devices):
    """Each of a layer's two reads is a launch forward, one again, and two backward, beside HC's
    measuring, or mHC's rounds."""
    executable = compiled(name, devices=devices)
    assert launches(executable) >= 10
    row = 2 * BATCH * LENGTH * WIDTH
    found = copies(parse(executable.as_text()), at_least=4 * row)
    assert [c.shape for c in found if c.shape[-1] in (WIDTH, 128)] == []


def test_prefill_runs_both_phases():
    text = compiled("block_attnres", Inference("prefill", LENGTH)).as_text()
    assert "depth_phase_one" in text
    assert "depth_merge" in text


def test_decoding_runs_the_kernels():
    assert launches(compiled("block_attnres", Inference("decode", LENGTH))) >= 2
