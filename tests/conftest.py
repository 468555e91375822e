"""Tests run on the CPU, with eight simulated devices."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # tests compile more than they compute


@pytest.fixture(autouse=True)
def registry():
    """Variants that a test defines are forgotten after it."""
    from depthjax.residuals import REGISTRY

    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)
