"""A forward pass in two phases gives what it gives in one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_depth import LAYERS, build, float64, ids  # noqa: F401

from depthjax.models import Remat
from depthjax.models.sublayers import LayerParams, Sublayers
from depthjax.models.vjp import scan_layers
from depthjax.residuals import BlockAttnRes

pytestmark = pytest.mark.jax_version


def phased(block: int, two_phase: bool, **options):
    """A model whose parameters do not depend on `two_phase`, none of them at its start."""
    return build(BlockAttnRes(block_size_sublayers=block, two_phase=two_phase), **options)


@pytest.mark.parametrize("block", [2, 3, 4, 10])
def test_logits(block):
    """Blocks that cut a layer, the last one short; all sublayers. Of one, a block has no phases."""
    two, one = (phased(block, two_phase)(ids()) for two_phase in (True, False))
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-12 * float(jnp.max(jnp.abs(one))))


def test_a_stack_in_pieces():
    """Cut within a block: the second piece asks for answers in its middle. The offset is traced."""
    model = phased(4, two_phase=True)
    params, rule = model.residual.layered(), model.residual.rule
    graphs, branches = zip(nnx.split(model.attention), nnx.split(model.mlp), strict=True)

    def branch(graph):
        return lambda state, x, ctx: nnx.merge(graph, state)(x, ctx)

    sublayers = Sublayers(rule, (branch(graphs[0]), branch(graphs[1])))
    layers = LayerParams.stacked(params, branches)
    embedding = model.embedding[...][ids()]

    @jax.jit
    def run(state, first, part):
        return scan_layers(sublayers, part, state, first, Remat())[0]

    state = rule.begin(embedding, LAYERS)
    for start, end in ((0, 3), (3, LAYERS)):
        state = run(state, start, jax.tree.map(lambda x: x[start:end], layers))  # noqa: B023
    features = rule.finish(params["final"], *state)
    expected = phased(4, two_phase=False).features(ids())[0]
    np.testing.assert_allclose(features, expected, rtol=0, atol=1e-11)


def test_gradients_are_those_of_one_phase():
    def gradient(two_phase):
        graph, params = nnx.split(phased(3, two_phase, remat=Remat("layer")))

        def total(params):
            return jnp.sum(jnp.sin(nnx.merge(graph, params)(ids())))

        return nnx.to_pure_dict(jax.jit(jax.grad(total))(params))

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9),
        gradient(True),
        gradient(False),
    )


def test_the_history_is_read_once_a_block():
    """Not an accident of the numbers: the program without derivatives has the two phases in it."""

    def text(two_phase):
        graph, params = nnx.split(phased(4, two_phase))
        return str(jax.make_jaxpr(lambda p: nnx.merge(graph, p)(ids()))(params))

    assert "cond[" in text(True)
    assert "cond[" not in text(False)
