"""A prompt over a mesh, whole and by chunks: the same logits, a share of the sources each."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from on_mesh import VOCAB, program_of, small

from depthjax.aot.compile import lower_prefill
from depthjax.config import build_model
from depthjax.infer import prefill
from depthjax.parallel import make_mesh
from depthjax.plan.hlo import parse
from depthjax.plan.hlo_history import history_bytes
from depthjax.residuals import BlockAttnRes, FullAttnRes

pytestmark = pytest.mark.jax_version

LENGTH, WIDTH, ROWS = 64, 32, 3  # 8 sublayers in blocks of 3


def config(tensor: int, rule=None):
    found = small(rule or BlockAttnRes(block_size_sublayers=3), tensor=tensor, data=8 // tensor)
    model = dataclasses.replace(found.model, context=LENGTH, heads=8, kv_heads=8)
    return dataclasses.replace(found, model=model)


@pytest.mark.parametrize(
    "rule", [BlockAttnRes(block_size_sublayers=3), FullAttnRes()], ids=lambda r: r.name
)
@pytest.mark.parametrize("chunk", [None, 16])
def test_logits_are_those_of_one_device(rule, chunk):
    model = build_model(config(4, rule), VOCAB)
    keys = iter(jax.random.split(jax.random.key(0), 99))

    def moved(leaf):  # queries start at zero
        return leaf + 0.1 * jax.random.normal(next(keys), leaf.shape)

    model = jax.tree.map(moved, model)
    ids = jax.random.randint(jax.random.key(1), (2, LENGTH), 0, VOCAB)
    run = lambda model, ids: prefill(model, ids, LENGTH, chunk=chunk)  # noqa: E731
    expected, cache = jax.jit(run)(model, ids)
    with jax.set_mesh(make_mesh(config(4, rule))):
        spread, spread_cache = jax.jit(lambda *given: run(*given))(model, ids)
    np.testing.assert_allclose(spread, expected, rtol=0, atol=2e-5)
    np.testing.assert_allclose(spread_cache.value, cache.value, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("tensor", "chunk"), [(1, None), (4, None), (8, None), (8, 16)])
def test_a_device_holds_its_share_of_the_sources(tensor, chunk):
    """N T D elements, divided over `tensor`, of the tokens of one chunk (arXiv 2603.15031: 15 GB
    for 8 blocks of 128K tokens of width 7168; 1.9 GB on 8 devices; 0.24 GB by chunks of 16K)."""
    wanted = config(tensor)
    mesh = program_of(wanted).mesh
    text = lower_prefill(wanted, VOCAB, mesh, LENGTH, 1, chunk).compile().as_text()
    found = history_bytes(parse(text), wanted.residual, wanted.shape, jnp.float32)
    assert found == ROWS * (chunk or LENGTH) // tensor * WIDTH * 4
