"""Another residual connection under a plain model leaves its function as it is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from small_models import parameters, random_model, small_config

from depthjax.config import build_model
from depthjax.errors import InputError
from depthjax.interop import largest_difference, with_residual
from depthjax.residuals import HC, MHC, BlockAttnRes, FullAttnRes, PostLN, PreLN
from depthjax.train.loss import mean_loss

TEXT = np.random.default_rng(3).integers(7, size=(4, 24), dtype=np.int32)


@jax.jit
def loss(model, ids):
    return mean_loss(model, ids)[0]


def plain(layers: int, steps: int = 0):
    """(config, model) of a plain model as initialised, where the stream is small and its epsilon
    matters most, or trained for some steps."""
    config = small_config(layers=layers)
    graph, params = nnx.split(build_model(config, 31), nnx.Param)
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(params, state):
        gradient = jax.grad(lambda p: mean_loss(nnx.merge(graph, p), TEXT)[0])
        updates, state = optimizer.update(gradient(params), state)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return config, nnx.merge(graph, params)


def block(size: int) -> BlockAttnRes:
    return BlockAttnRes(block_size_sublayers=size)


@pytest.mark.jax_version
@pytest.mark.parametrize(
    ("layers", "steps", "residuals"),
    [  # block sizes odd and even, dividing the depth and ragged
        (2, 60, [FullAttnRes(), block(3)]),
        (5, 0, [HC(), block(4), block(5)]),
        (8, 20, [BlockAttnRes(), block(7)]),
        (32, 0, [FullAttnRes()]),
        (32, 20, [block(11)]),
    ],
)
def test_loss_stays(layers, steps, residuals):
    config, model = plain(layers, steps)
    for residual in residuals:
        changed, other = with_residual(config, model, residual)
        assert changed.model.residual.name == residual.name
        np.testing.assert_allclose(
            loss(other, TEXT), loss(model, TEXT), rtol=0, atol=1e-4, err_msg=repr(residual)
        )


def test_everything_trained_is_copied_and_the_rest_is_at_its_init():
    config = small_config(PreLN(eps=1e-5))
    model = random_model(config)
    changed, other = with_residual(config, model, BlockAttnRes(block_size_sublayers=3))
    residual = changed.residual
    assert (residual.eps, residual.block) == (1e-5, 3)
    assert 0 < residual.mix_eps < 1e-5
    before, after = parameters(model), parameters(other)
    assert all(np.array_equal(after[name], value) for name, value in before.items())
    added = after.keys() - before.keys()
    assert added
    for name in added:
        np.testing.assert_array_equal(after[name], 0 if name.endswith("query") else 1)


def test_measured_difference_sees_one():
    config = small_config(layers=2)
    model = random_model(config)
    _, other = with_residual(config, model, FullAttnRes())
    assert largest_difference(model, model) == 0
    assert largest_difference(model, other) < 1e-3
    other.head[...] = 2 * other.head[...]
    assert largest_difference(model, other) > 1e-2


def test_what_would_change_the_function_is_refused():
    config, model = plain(2)
    with pytest.raises(InputError, match=r"'mhc', which would compute another function: choose"):
        with_residual(config, model, MHC())
    with pytest.raises(InputError, match=r"block_size_sublayers is 5, but 2 layers"):
        with_residual(config, model, BlockAttnRes(block_size_sublayers=5))
    config = small_config(PostLN())
    with pytest.raises(InputError, match=r"'post_ln': only a pre_ln checkpoint"):
        with_residual(config, build_model(config, 31), FullAttnRes())


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_parameters_that_are_not_finite_are_named(value):
    config = small_config(layers=2)
    model = build_model(config, 31)
    model.embedding[...] = 1e30 * jnp.ones_like(model.embedding[...])
    with pytest.raises(InputError, match="residual stream is not finite on random token ids"):
        with_residual(config, model, FullAttnRes())
    model.head[...] = model.head[...].at[3, 4].set(value)
    for residual in (FullAttnRes(), HC()):
        with pytest.raises(InputError, match=r"parameters are not finite \(head is the first"):
            with_residual(config, model, residual)
