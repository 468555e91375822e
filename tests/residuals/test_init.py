"""How each variant starts, and what of it is decayed, as DepthBench, 2, prescribes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from depthjax.models import Shape, Transformer, shape_of
from depthjax.residuals import HC, MHC, DeepNorm, MHCNative, MHCStatic, MoDA
from depthjax.residuals.mhc import log_sinkhorn, sinkhorn

SHAPE = Shape(layers=3, width=64, heads=4, kv_heads=2, mlp_width=160)
TRUNCATED = 0.9866 * 0.02  # standard deviation of a normal of 0.02 cut at three of them


def build(residual):
    return Transformer(SHAPE, 512, residual, rngs=nnx.Rngs(0))


def spread(parameter):
    return float(np.std(parameter[...]))


def test_deepnorm_shrinks_all_but_query_and_key():
    model, beta = build(DeepNorm()), (8 * SHAPE.layers) ** -0.25
    for matrix in (model.attention.value, model.attention.out):
        assert spread(matrix) == pytest.approx(beta * TRUNCATED, rel=0.03)
    for matrix in (model.mlp.gate, model.mlp.up, model.mlp.down):
        assert spread(matrix) == pytest.approx(beta * TRUNCATED, rel=0.03)
    for matrix in (model.attention.query, model.attention.key, model.embedding, model.head):
        assert spread(matrix) == pytest.approx(TRUNCATED, rel=0.03)


@pytest.mark.parametrize("residual", [HC(), MHC(), MHCNative(), MHCStatic()], ids=lambda r: r.name)
def test_streams_halve_what_is_written(residual):
    """W_o and w2 are divided by sqrt(m) = 2, nothing else is."""
    model = build(residual)
    for matrix in (model.attention.out, model.mlp.down):
        assert spread(matrix) == pytest.approx(TRUNCATED / 2, rel=0.03)
    for matrix in (model.attention.value, model.mlp.up, model.head):
        assert spread(matrix) == pytest.approx(TRUNCATED, rel=0.03)


@pytest.mark.parametrize("residual", [HC(), MHC(), MHCNative(), MHCStatic()], ids=lambda r: r.name)
def test_streams_start_near_one_plain_stream(residual):
    """Sublayer s reads stream s mod 4; each stream is carried on; writes have weight 1 (static mHC:
    a quarter, as they sum to one)."""
    model = build(residual)
    streams = jax.random.normal(jax.random.key(0), (5, 4, SHAPE.width))
    for s in range(2 * SHAPE.layers):
        read, write, transport = residual.weights(model.residual.sublayer_params(s), streams)
        atol = 1e-6 if residual.name == "hc" else 1.1e-3
        np.testing.assert_allclose(read, np.tile(np.eye(4)[s % 4], (5, 1)), atol=atol)
        expected = 0.25 if residual.name == "mhc_static" else 1.0
        np.testing.assert_allclose(write, np.full((5, 4), expected), atol=1e-6)
        np.testing.assert_allclose(transport, np.tile(np.eye(4), (5, 1, 1)), atol=atol)
        if residual.name == "mhc":  # DepthBench, 2.7
            np.testing.assert_allclose(transport[:, 0, 0], 0.99899, atol=1e-5)
            np.testing.assert_allclose(transport[:, 0, 1], 3.4e-4, atol=5e-6)


def test_moda_projection():
    projection = build(MoDA()).residual.mlp["kv_proj"]
    assert projection[...].shape == (SHAPE.layers - 1, SHAPE.width, 2, 2, 16)
    assert spread(projection) == pytest.approx(TRUNCATED, rel=0.03)


@pytest.mark.parametrize(
    ("residual", "total"),
    [
        (HC(), 405_702_880),
        (MHC(), 410_126_608),
        (MHCNative(), 410_126_608),
        (MHCStatic(), 405_407_872),
        (MoDA(), 453_641_216),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_parameters_at_24_layers(residual, total):
    """DepthBench, 2.12."""
    model = nnx.eval_shape(
        lambda: Transformer(shape_of("400m-L24"), 50280, residual, rngs=nnx.Rngs(0))
    )
    assert sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))) == total


def test_what_is_never_decayed():
    """Static connectors; dynamic ones are decayed (DepthBench, "training recipe")."""
    groups = {}
    for residual in (HC(), MHC(), MHCNative(), MHCStatic()):
        for name, parameter in residual.parameters(4, 64)["mlp"].items():
            groups.setdefault(parameter.decay, set()).add(name)
    assert groups["never"] == {
        *("static_alpha", "static_beta", "b", "alpha_pre", "alpha_post", "alpha_res"),
        *("pre_bias", "post_bias", "residual_bias"),
        *("H_pre_logits", "H_post_logits", "H_res_logits"),
    }
    assert {"dynamic_alpha_proj", "dynamic_beta_proj", "phi"} <= groups["matrix"]
    assert groups["vector"] >= {"norm", "dynamic_alpha_scale", "dynamic_beta_scale", "pre_gate"}


@pytest.mark.parametrize("project", [sinkhorn, log_sinkhorn])
def test_sinkhorn_is_doubly_stochastic_with_the_right_gradient(project):
    """Columns, normalised last, sum to one; rows nearly; gradients equal finite differences."""
    with jax.enable_x64(True):
        logits = jax.random.normal(jax.random.key(0), (7, 4, 4), jnp.float64)
        matrix = project(logits, 20)
        np.testing.assert_allclose(matrix.sum(-2), 1, atol=1e-5)
        np.testing.assert_allclose(matrix.sum(-1), 1, atol=1e-5)
        target = jax.random.normal(jax.random.key(1), matrix.shape, jnp.float64)

        def loss(logits):
            return jnp.sum(project(logits, 20) * target)

        gradient, step = jax.grad(loss)(logits), 1e-6
        for index in [(0, 0, 0), (3, 1, 2), (6, 3, 3)]:
            shift = jnp.zeros_like(logits).at[index].set(step)
            difference = (loss(logits + shift) - loss(logits - shift)) / (2 * step)
            np.testing.assert_allclose(gradient[index], difference, rtol=1e-5, atol=1e-8)
