"""Products of two matrices, counted on the compiled gradient of every variant, against the
formula."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from depthjax.models import Shape, Transformer
from depthjax.plan.flops import matmul_flops_per_sequence
from depthjax.plan.hlo import parse
from depthjax.plan.hlo_cost import count_flops
from depthjax.residuals import REGISTRY
from depthjax.train.loss import mean_loss

SHAPE = Shape(layers=16, width=768, heads=4, kv_heads=4, mlp_width=2048)
VOCAB, BATCH, TOKENS = 256, 2, 96


@pytest.mark.jax_version
@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_counted_products_are_the_formula(name):
    """XLA's attention over the whole square, everything kept for the backward, a scan over the
    layers, which computes what the last layer lacks as well. Within 1 %."""
    model = nnx.eval_shape(lambda: Transformer(SHAPE, VOCAB, REGISTRY[name](), rngs=nnx.Rngs(0)))
    graph, params = nnx.split(model)

    def loss(params, ids):
        return mean_loss(nnx.merge(graph, params), ids)[0]

    ids = jax.ShapeDtypeStruct((BATCH, TOKENS), jnp.int32)
    compiled = jax.jit(jax.grad(loss)).lower(params, ids).compile()
    counted = count_flops(parse(compiled.as_text())).matmul
    formula = matmul_flops_per_sequence(SHAPE, VOCAB, TOKENS, model.residual.rule)
    assert counted == pytest.approx(BATCH * formula, rel=0.01)
