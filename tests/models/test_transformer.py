"""Properties of the backbone that no single residual connection explains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from depthjax.kernels import depth_mix, rms_norm
from depthjax.layers.rope import rope
from depthjax.models import Shape, Transformer
from depthjax.models.sublayers import tap
from depthjax.residuals import BlockAttnRes, FullAttnRes, PreLN

SHAPE = Shape(layers=4, width=64, heads=4, kv_heads=2, mlp_width=96)


def build(residual, **options):
    return Transformer(SHAPE, 97, residual, rngs=nnx.Rngs(3), **options)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_zero_queries_compute_pre_ln(size):
    """At init all queries are zero, a mixture is the mean of its sources, and the norm behind it
    does not see the factor (Attention Residuals; up to the norms' eps, here made negligible)."""
    ids = jax.random.randint(jax.random.key(0), (2, 9), 0, 97)
    plain = build(PreLN(eps=1e-12))(ids)
    mixed = build(BlockAttnRes(block_size_sublayers=size, eps=1e-12, mix_eps=1e-12))(ids)
    np.testing.assert_allclose(mixed, plain, rtol=0, atol=2e-6)


def test_a_layer_writes_a_row_for_each_sublayer_that_may_end_a_block():
    """The first of a layer alone, where blocks are even."""

    def writes(jaxpr):
        found = sum(each.primitive.name == "dynamic_update_slice" for each in jaxpr.eqns)
        inner = jax.tree.leaves([list(each.params.values()) for each in jaxpr.eqns])
        inner = [getattr(each, "jaxpr", each) for each in inner]
        return found + sum(writes(each) for each in inner if hasattr(each, "eqns"))

    def of_block(size):
        graph, params = nnx.split(build(BlockAttnRes(block_size_sublayers=size)))
        ids = jnp.zeros((1, 3), jnp.int32)
        return writes(jax.make_jaxpr(lambda p: nnx.merge(graph, p)(ids))(params).jaxpr)

    assert [of_block(size) for size in (2, 3)] == [1, 2]


def test_block_of_one_sublayer_is_full():
    ids = jax.random.randint(jax.random.key(0), (2, 9), 0, 97)
    full, block = build(FullAttnRes()), build(BlockAttnRes(block_size_sublayers=1))
    np.testing.assert_array_equal(full(ids), block(ids))


def test_initialisation():
    """sigma 0.02 cut at 3 sigma has standard deviation 0.9866 * 0.02; norms 1; queries 0."""
    model = Transformer(
        Shape(layers=6, width=128, heads=4, kv_heads=4, mlp_width=352),
        1000,
        FullAttnRes(),
        rngs=nnx.Rngs(0),
    )
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        value = np.asarray(leaf[...])
        if path[-1] == "query" and path[0] == "residual":
            assert not value.any(), path
        elif path[0] == "residual":
            assert (value == 1).all(), path
        else:
            assert abs(value.std() / 0.02 - 0.9866) < 0.01, path
            assert abs(value.mean()) < 1e-3, path
            assert 0.055 < np.abs(value).max() <= 0.06, path


def test_layers_are_drawn_apart():
    attention = build(PreLN()).attention.query[...]
    assert not jnp.array_equal(attention[0], attention[1])


def test_causality():
    """Changing token t changes no logit before t."""
    model = build(BlockAttnRes())
    ids = jax.random.randint(jax.random.key(0), (1, 12), 0, 97)
    changed = model(ids.at[0, 7].set((ids[0, 7] + 1) % 97))
    np.testing.assert_allclose(changed[:, :7], model(ids)[:, :7], rtol=0, atol=1e-6)
    assert jnp.all(jnp.any(changed[:, 7:] != model(ids)[:, 7:], axis=-1))


def test_rope_sees_only_distances():
    """The dot product of q at t and k at t' depends on t - t' alone; position 0 is not rotated."""
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))
    rotated_q, rotated_k = (rope(jnp.broadcast_to(x, (1, 20, 1, 16))) for x in (q, k))
    scores = jnp.einsum("bthe,bshe->ts", rotated_q, rotated_k)
    for distance in range(-5, 6):
        diagonal = jnp.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(rotated_q[:, 0], q[:, 0])


def test_tap_reads_the_squared_gradient():
    x = jax.random.normal(jax.random.key(0), (3, 5))
    gradient, reading = jax.grad(lambda x, m: jnp.sum(tap(x, m) ** 3), (0, 1))(x, jnp.zeros(()))
    np.testing.assert_allclose(gradient, 3 * x**2, rtol=1e-6)
    np.testing.assert_allclose(reading, jnp.sum(9 * x**4), rtol=1e-5)


def test_depth_mix_against_a_plain_softmax():
    """Attention Residuals, in NumPy."""
    rng = np.random.default_rng(0)
    sources, query, scale = rng.normal(size=(5, 7, 16)), rng.normal(size=16), rng.normal(size=16)
    keys = sources / np.sqrt((sources**2).mean(-1, keepdims=True) + 1e-5) * scale
    weights = np.exp(keys @ query)
    weights /= weights.sum(0)
    expected = (weights[..., None] * sources).sum(0)
    arguments = jnp.asarray(sources, jnp.float32), jnp.asarray(query), jnp.asarray(scale)
    np.testing.assert_allclose(depth_mix(*arguments, eps=1e-5), expected, rtol=1e-4, atol=1e-5)
    shared = {"count": 4, "newest": arguments[0][4], "eps": 1e-5}
    split = depth_mix(*arguments, **shared)  # row 4 is dead in the buffer, and given as the newest
    np.testing.assert_allclose(split, expected, rtol=1e-4, atol=1e-5)
    normed = depth_mix(*arguments, eps=1e-5, output_scale=arguments[1])
    np.testing.assert_allclose(normed, rms_norm(split, arguments[1], 1e-5), rtol=1e-4, atol=1e-5)
