"""Plans for accelerators that are not here: `pytest -m plan`, minutes of CPU."""

import dataclasses
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from depthjax.aot.compile import Inference, compile_lowered, effort_options
from depthjax.aot.entry import make_entry
from depthjax.aot.topology import devices_of, prepare_environment, target
from depthjax.config import Config, ModelConfig, TrainConfig, load_config
from depthjax.errors import InputError
from depthjax.parallel import make_mesh
from depthjax.plan.flops import matmul_flops_per_sequence
from depthjax.plan.hlo import parse
from depthjax.plan.hlo_cost import count_flops
from depthjax.plan.hlo_traffic import hbm_bytes
from depthjax.residuals import REGISTRY

pytestmark = [
    pytest.mark.plan,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu"),
    pytest.mark.filterwarnings("ignore"),  # of what compilers load
]
STUDY = str(pathlib.Path(__file__).parents[2] / "configs" / "depthbench.py")
VOCAB = 50280


def described(name: str):
    """A target and its mesh."""
    try:
        found = target(name)
    except InputError as error:
        pytest.skip(str(error))
    prepare_environment(found)
    return found, Mesh(np.array(devices_of(found)), ("data",), axis_types=(AxisType.Auto,))


def plan(config: Config, topology: str, vocab: int = VOCAB, effort: str | None = "O0"):
    found, mesh = described(topology)
    options = effort_options(effort, found.platform)
    return make_entry(config.check(), vocab, found, mesh, options=options)


def small(**changes) -> Config:
    sizes = {"layers": 16, "width": 512, "heads": 8, "mlp_width": 1376, "context": 512}
    model = ModelConfig(shape="custom", **{**sizes, **changes})
    return Config(model=model, train=TrainConfig(batch=16))


@pytest.mark.parametrize(
    ("topology", "devices"),
    [("v6e:1x1", 1), ("v5e:2x1", 2), ("v5p:1x1x1", 1), ("v5p:2x2x1", 4), ("v6e:4x2", 8)],
)
def test_parts_of_a_host_are_targets(topology, devices):
    found = target(topology)
    prepare_environment(found)
    assert len(devices_of(found)) == devices


@pytest.mark.parametrize(
    "topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1", "h100:8"]
)
def test_every_chip_has_a_plan(topology):
    # In bfloat16 some compilers sum gradients in bfloat16 too, and send half as much.
    sizes = {"layers": 2, "width": 128, "heads": 2, "mlp_width": 352}
    entry = plan(small(**sizes, dtype="float32"), topology, vocab=1024)
    assert entry.fits
    assert entry.notes == [] or topology.startswith("h100")
    parameters = entry.parameters
    assert entry.argument_bytes == pytest.approx(12 * parameters, rel=0.02)
    (sums,) = [c for c in entry.collectives if c.payload > parameters]
    assert (sums.kind, sums.axes, sums.group) == ("all-reduce", "data", entry.devices)
    ring = 2 * (entry.devices - 1) / entry.devices
    assert entry.collective_bytes == pytest.approx(4 * ring * parameters, rel=0.02)


def test_slices_sum_gradients_over_the_data_center():
    """Each device sends to the other slice what it summed within its own: its share of them."""
    found = target("2xv5p:2x2x1")
    prepare_environment(found)
    sizes = {"layers": 2, "width": 128, "heads": 2, "mlp_width": 352}
    config = small(**sizes, dtype="float32").check()
    mesh = make_mesh(config, devices_of(found))
    assert [d.slice_index for d in mesh.devices.flat] == [0] * 4 + [1] * 4
    entry = make_entry(config, 1024, found, mesh, options=effort_options("O0", "tpu"))
    between = [c for c in entry.collectives if "between slices" in c.axes]
    assert {c.kind for c in between} == {"all-reduce"}
    assert sum(c.payload for c in between) == pytest.approx(4 * entry.parameters / 4, rel=0.05)
    assert all(c.axes.startswith("data") for c in entry.collectives)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_counted_products_are_the_formula(name):
    """On v6e, XLA's attention over the whole square, everything kept for the backward: 1 %."""
    # In float32: products of bfloat16 streams are three, see `kernels.streams`.
    # Of few tokens: attention over depth weighs the sequence once more in the backward pass. And of
    # so many that no flash kernel takes them, which would leave out half of the square.
    sizes = {"vocab": 4096, "context": 96, "dtype": "float32"}
    config = small(residual=REGISTRY[name](), **sizes)
    config = dataclasses.replace(config, train=TrainConfig(batch=1))
    entry = plan(config, "v6e:1x1", vocab=4096)
    assert entry.notes == []
    formula = matmul_flops_per_sequence(config.shape, 4096, 96, config.residual)
    assert entry.flops_compiled == pytest.approx(formula, rel=0.01)


def test_a_scan_is_its_unrolled_twin():
    found, mesh = described("v6e:1x1")
    x = jax.ShapeDtypeStruct((1024, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
    w = jax.ShapeDtypeStruct((8, 2048, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, P()))

    def scanned(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    def unrolled(x, w):
        for one in w:
            x = jnp.tanh(x @ one)
        return x

    counts = []
    for function in (scanned, unrolled):
        lowered = jax.jit(function).lower(x, w)
        compiled = compile_lowered(lowered, found, effort_options("O0", "tpu"))
        counts.append(parse(compiled.executable.as_text()))
    flops = [count_flops(module).matmul for module in counts]
    assert flops == [8 * 2 * 1024 * 2048**2] * 2
    moved = [hbm_bytes(module) for module in counts]
    least = 8 * 2 * (2048**2 + 2 * 1024 * 2048)  # each matrix, each activation in and out
    assert moved[1] == pytest.approx(least, rel=0.01)
    # The loop copies its carry, since a product cannot overwrite its own operand; the entry may
    # change the layout of what goes in and comes out.
    copy = 2 * 2 * 1024 * 2048
    assert least <= moved[0] <= least + (8 + 2) * copy + 1000


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_compile_cost_does_not_grow_with_depth(name):
    counts = []
    for layers in (16, 70):
        config = small(layers=layers, vocab=4096, residual=REGISTRY[name]())
        counts.append(plan(config, "v6e:1x1", vocab=4096).hlo_instructions)
    assert counts[1] == pytest.approx(counts[0], rel=0.02)


def test_what_does_not_fit_is_explained():
    """256 sequences' fp32 logits alone are 105 GB; v6e has 31 GiB."""
    config = load_config(STUDY, "400m-L16", "pre_ln")
    config = dataclasses.replace(config, train=TrainConfig(batch=256, accumulate=1))
    entry = plan(config, "v6e:1x1")
    assert not entry.fits
    assert entry.peak_bytes - entry.missing_bytes == entry.capacity_bytes
    assert len(entry.largest_buffers) == 3
    assert entry.largest_buffers[0].shape == "f32[256,2047,50280]"
    assert [k.change.split()[0] for k in entry.knobs].count("--train.accumulate") == 1
    assert len(entry.knobs) == 2


def test_the_deepest_plan_takes_under_four_minutes():
    """Full Attention Residuals of 70 layers, the study's recipe, on 64 chips at full effort."""
    config = load_config(STUDY, "400m-L70", "full_attnres")
    entry = plan(config, "v5p:4x4x4", effort=None)
    assert entry.compile_cpu_s < 240
    assert entry.notes == []


def test_decoding_costs_what_weights_and_cache_do():
    """On v6e: each matrix and the keys and values are read once, the cache is written in place,
    and Attention Residuals add less than 2 % of bytes (arXiv 2603.15031: of latency)."""
    found, mesh = described("v6e:1x1")
    entries = []
    for name in ("pre_ln", "block_attnres"):
        config = load_config(STUDY, "400m-L32", name).check()
        step = Inference("decode", 2048)
        entries.append(make_entry(config, VOCAB, found, mesh, options={}, inference=step))
    plain, mixed = entries
    # Each row of the embedding is read where it is needed; XLA may fetch the table all the same.
    table = 2 * VOCAB * config.shape.width
    least = plain.parameter_bytes - table + plain.cache_bytes
    assert least <= plain.hbm_bytes <= 1.03 * least + 2 * table
    assert max(entry.temp_bytes for entry in entries) < plain.cache_bytes / 32 / 4
    assert mixed.hbm_bytes <= 1.02 * plain.hbm_bytes


def test_decoding_compiles_for_every_variant():
    found, mesh = described("v5e:1x1")
    for name in REGISTRY:
        config = small(residual=REGISTRY[name](), vocab=4096).check()
        step = Inference("decode", 1024, rows=4)
        options = effort_options("O0", "tpu")
        entry = make_entry(config, 4096, found, mesh, options=options, inference=step)
        assert entry.fits, name
        assert entry.temp_bytes < entry.cache_bytes / 2, name
        assert entry.hbm_bytes < 2.5 * (entry.parameter_bytes + entry.cache_bytes), name
