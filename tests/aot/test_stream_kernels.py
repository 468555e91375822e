"""The kernels of streams, compiled for every TPU: `pytest -m plan`."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_plan_targets import described, pytestmark  # noqa: F401

from depthjax.kernels import read_streams
from depthjax.residuals import ATTENTION, HC, MHC

TOPOLOGIES = ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:1x1", "tpu7x:2x2x1"]


def compiled(rule, topology: str, tokens: int, width: int):
    """The read and its gradients, of a row of tokens on each device."""
    found, mesh = described(topology)

    def array(shape, dtype=jnp.float32, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

    params = {name: array(p.shape) for name, p in rule.connection(ATTENTION, width).items()}
    params["norm"] = array((width,))
    shape = (rule.streams, found.devices, tokens, width)
    streams = array(shape, jnp.bfloat16, None, "data")

    def loss(params, streams):
        gates, columns = rule.gates(params), rule.columns(params)
        results = read_streams(rule.weigh, rule.eps, gates, columns, params["norm"], streams)
        return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in results)

    with jax.set_mesh(mesh):
        return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, streams).compile()


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_kernels_compile_for_every_tpu(topology):
    text = compiled(HC(), topology, 2048, 1024).as_text()
    assert "read_streams_backward" in text


@pytest.mark.parametrize("width", [896, 7168])
@pytest.mark.parametrize("tokens", [1, 300])
def test_any_shape_compiles(width, tokens):
    text = compiled(MHC(), "v6e:1x1", tokens, width).as_text()
    assert "read_streams_backward" in text
