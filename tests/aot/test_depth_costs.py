"""What depth costs on a TPU, by the planner's own figures: `pytest -m plan`, minutes of CPU.

The study's 400M shapes on one v6e, 8 sequences of 2048 tokens, bfloat16, each layer rematerialised.
"""

import dataclasses
import functools

import pytest
from test_plan_targets import STUDY, VOCAB, described, plan, pytestmark  # noqa: F401

from depthjax.aot.compile import compile_lowered, effort_options, lower_training
from depthjax.config import TrainConfig, load_config
from depthjax.plan.hlo import parse
from depthjax.plan.hlo_buffers import copies


def study(variant: str, depth: int, **changes):
    config = load_config(STUDY, f"400m-L{depth}", variant)
    model = dataclasses.replace(config.model, **changes)
    return dataclasses.replace(config, model=model, train=TrainConfig(batch=8))


@functools.cache
def entry(variant: str, depth: int = 32, **changes):
    return plan(study(variant, depth, **changes), "v6e:1x1")


def test_the_plain_step_takes_no_more_than_maxtext():
    """MaxText 0.2.5's step of this size takes 3.18 GB of temporaries at this effort."""
    assert entry("pre_ln").temp_bytes <= 1.05 * 3.18e9


@pytest.mark.parametrize(
    ("variant", "layers", "at_most"),
    [
        ("block_attnres", 16, 1.15),
        ("block_attnres", 32, 1.10),
        ("block_attnres", 70, 1.10),
        ("full_attnres", 16, 1.15),
        ("full_attnres", 32, 1.15),
        ("full_attnres", 70, 1.20),  # 71 rows more than the layers' inputs alone make 1.18
        ("hc", 32, 1.45),
        ("mhc", 32, 1.45),
        ("moda", 32, 2.10),
    ],
)
def test_peak_against_the_plain_step(variant, layers, at_most):
    assert entry(variant, layers).peak_bytes <= at_most * entry("pre_ln", layers).peak_bytes


def test_groups_of_layers_take_less():
    grouped = entry("block_attnres", remat="group", remat_group=4)
    assert grouped.peak_bytes < entry("block_attnres").peak_bytes
    assert grouped.peak_bytes < entry("pre_ln").peak_bytes
    assert grouped.flops_compiled <= 1.25 * entry("block_attnres").flops_compiled


@pytest.mark.parametrize("variant", ["pre_ln", "block_attnres", "full_attnres"])
def test_as_many_instructions_at_any_depth(variant):
    """At one width: tiles fill 640 features, but not the 1216 of 400m-L16, which takes 2 % more."""
    sizes = dataclasses.asdict(load_config(STUDY, "400m-L70", variant).shape)
    deep = entry(variant, 70).hlo_instructions
    shallow = entry(variant, 16, **{**sizes, "layers": 16}, shape="custom").hlo_instructions
    assert deep == pytest.approx(shallow, rel=0.02)


def test_reading_all_sources_moves_at_most_eight_times_as_much():
    assert entry("full_attnres").hbm_bytes <= 8 * entry("pre_ln").hbm_bytes


@pytest.mark.parametrize("variant", ["block_attnres", "full_attnres", "moda"])
def test_no_history_is_copied(variant):
    config = study(variant, 32)
    found, mesh = described("v6e:1x1")
    lowered = lower_training(config, VOCAB, mesh)
    compiled = compile_lowered(lowered, found, effort_options("O0", "tpu"))
    rows = {8, 62, 65}  # of the history: blocks, sublayers but two, those and the embedding
    copied = copies(parse(compiled.executable.as_text()), at_least=10**8)
    assert [c for c in copied if c.shape[0] in rows and c.shape[1:3] == (8, 2048)] == []
