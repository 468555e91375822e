"""The kernels of the depth mixture compile for every TPU: `pytest -m plan`."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_plan_targets import described, pytestmark  # noqa: F401

from depthjax.kernels import depth_read, gather_rows, mix_rows

ROWS, TOKENS = 9, 640  # the last block of tokens is not full


def read(arrays, count):
    """Value and gradients of the read of Block Attention Residuals."""

    def run(history, newest, u):
        return depth_read(history, newest, u, count, 1e-6, u)

    result, pull = jax.vjp(run, arrays["rows"], arrays["newest"], arrays["u"])
    return result, pull(result)


def pull(arrays, count):
    """What the pull form of Full Attention Residuals computes."""
    directions = jnp.broadcast_to(arrays["u"], (ROWS, *arrays["u"].shape))
    rows, lse = arrays["rows"], arrays["lse"]
    mixture, _ = mix_rows(rows, count, arrays["u"], 1e-6)
    return mixture, gather_rows(rows, count, arrays["newest"], directions, lse, lse, 1e-6)


def kernels_of(topology: str, tokens: int, width: int) -> str:
    """The compiled program of all kernels."""
    _, mesh = described(topology)
    sharding = NamedSharding(mesh, P())
    shapes = {"rows": (ROWS, 1, tokens, width), "newest": (1, tokens, width)}
    arrays = {
        n: jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=sharding) for n, s in shapes.items()
    }
    for name, shape in {"u": (width,), "lse": (ROWS, 1, tokens)}.items():
        arrays[name] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding)
    with jax.set_mesh(mesh):
        return jax.jit(lambda *a: (read(*a), pull(*a))).lower(arrays, count).compile().as_text()


@pytest.mark.parametrize("width", [896, 1024, 7168])
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:1x1", "tpu7x:2x2x1"])
def test_every_tpu_takes_the_kernels(topology, width):
    text = kernels_of(topology, TOKENS, width)
    wide = topology.startswith("v4") and width == 7168  # du of all readers alone would fill VMEM
    for kernel in ("depth_mix", "depth_mix_backward", *([] if wide else ["depth_gather"])):
        assert f"{kernel}." in text or f"{kernel}__" in text


@pytest.mark.parametrize("tokens", [1, 96, 208, 300])
def test_any_number_of_tokens_compiles(tokens):
    assert "depth_gather" in kernels_of("v6e:1x1", tokens, 512)
