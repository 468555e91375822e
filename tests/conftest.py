"""Tests run on the CPU, with eight simulated devices, and so do the commands that they start.

They compile more than they compute, so they compile cheaply, and what one process has compiled the
others load: workers and commands share a cache, which is gone afterwards. Name a folder in
JAX_COMPILATION_CACHE_DIR, and it stays for the next time.
"""

import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled = tempfile.TemporaryDirectory(prefix="depthjax-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.name

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
if jax.__version_info__ < (0, 11):  # halves the time to compile; later versions lack the flag
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{given} --xla_cpu_use_fusion_emitters=false".strip()


@pytest.fixture(autouse=True)
def registry():
    """Variants that a test defines are forgotten after it."""
    from depthjax.residuals import REGISTRY

    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)
