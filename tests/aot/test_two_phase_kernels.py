"""Both phases' kernels compile for every TPU, and move what they must: `pytest -m plan`."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_plan_targets import described, pytestmark  # noqa: F401

from depthjax.kernels import phase1, phase2
from depthjax.kernels.two_phase.api import phase1_backward
from depthjax.plan.hlo import parse
from depthjax.plan.hlo_traffic import hbm_bytes

CHIPS = "v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:1x1", "tpu7x:2x2x1"
N, S = 8, 8


def compiled(topology, function, *shapes, donate=()):
    """One launch for one device's share of the tokens, which are divided over the chips."""
    _, mesh = described(topology)

    def array(axis, shape, dtype):
        spec = P() if axis is None else P(*[None] * axis, "data")
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        lowered = jax.jit(function, donate_argnums=donate).lower(*(array(*x) for x in shapes))
        text = lowered.compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    return text, mesh.size


@pytest.mark.parametrize("width", [896, 7168])
@pytest.mark.parametrize("topology", CHIPS)
def test_every_chip_takes_both_phases(topology, width):
    _, mesh = described(topology)
    batch, tokens, bf16, fp32 = mesh.size, 512, jnp.bfloat16, jnp.float32
    rows, one = (N, batch, tokens, width), (batch, tokens, width)
    sources, queries = (1, rows, bf16), (None, (S, width), fp32)
    mixtures, lse = (1, (S, *one), bf16), (1, (S, batch, tokens), fp32)
    count, vector, token = (None, (), jnp.int32), (None, (width,), fp32), (0, one, bf16)
    unit = tokens * width * 2

    def moved(least, function, *shapes, **options):
        text, _ = compiled(topology, function, *shapes, **options)
        # Of few tokens the parameters are some percent.
        assert hbm_bytes(parse(text)) <= 1.06 * least * unit

    moved(N + S, lambda v, u: phase1(v, u), sources, queries)
    compiled(topology, lambda v, u, n: phase1(v, u, count=n), sources, queries, count)

    def backward(v, u, lse, by, by_lse):
        return phase1_backward(v, u, lse, by, by_lse)

    moved(2 * N + S, backward, sources, queries, lse, mixtures, lse)

    def merge(o, lse, p, y, q, scale, fresh):
        return phase2(o, lse, p, y, query=q, norm_scale=scale, fresh=fresh)

    small = (0, one[:-1], fp32), token, token, vector, vector, (None, (), jnp.bool_)
    moved(5, merge, token, *small)


@pytest.mark.parametrize("topology", CHIPS[1:])
@pytest.mark.parametrize("queries", [16, 18])
def test_wide_rows_of_many_queries_fit(topology, queries):
    """18 are the most of the largest block; the backward pass, which holds more."""
    _, mesh = described(topology)
    one, bf16, fp32 = (mesh.size, 512, 7168), jnp.bfloat16, jnp.float32
    mixtures, lse = (1, (queries, *one), bf16), (1, (queries, *one[:2]), fp32)
    shapes = (1, (N, *one), bf16), (None, (queries, one[-1]), fp32), lse, mixtures, lse
    compiled(topology, lambda *arrays: phase1_backward(*arrays), *shapes)


@pytest.mark.parametrize("tokens", [1, 8])
def test_a_decode_step_is_one_launch(tokens):
    def merge(o, lse, p, y, q, scale):
        return phase2(o, lse, p, y, query=q, norm_scale=scale)

    token, vector = (None, (1, tokens, 1024), jnp.bfloat16), (None, (1024,), jnp.float32)
    lse = None, (1, tokens), jnp.float32
    compiled("v6e:1x1", merge, token, lse, token, token, vector, vector)
