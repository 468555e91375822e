"""The recipe against its definition, and AdamW against torch's order of operations in NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from depthjax.config import Config, ModelConfig, TrainConfig, build_model
from depthjax.residuals import (
    HC,
    MHC,
    BlockAttnRes,
    CompleteP,
    DepthMuP,
    MHCNative,
    MHCStatic,
    Residual,
    UpdateScale,
)
from depthjax.train.optimizer import clip, learning_rate, scaled_adamw, update_scales


@pytest.mark.parametrize(("steps", "warmup"), [(7600, 760), (50, 5), (10, 0), (10, 10)])
def test_learning_rate(steps, warmup):
    """DepthBench, section 2, at every 1-based step and beyond the last."""
    train = TrainConfig(steps=steps)

    def published(k):
        if k < warmup:
            return 2e-3 * k / warmup
        if k < steps:
            angle = math.pi * (k - warmup) / (steps - warmup)
            return 0.1 * 2e-3 + 0.9 * 2e-3 * (1 + math.cos(angle)) / 2
        return 0.1 * 2e-3

    ks = np.arange(1, steps + 5)
    rates = jax.vmap(lambda k: learning_rate(k, train, 2e-3, warmup))(ks)
    np.testing.assert_allclose(rates, [published(int(k)) for k in ks], rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("decay_vectors", [False, True])
def test_what_is_decayed(decay_vectors):
    """Matrices always; norms and depth queries only in the authors' recipe."""
    scales = scales_of(BlockAttnRes(), decay_vectors=decay_vectors)
    vectors = {path for path in scales if path.startswith("residual/")}
    assert len(vectors) == 9
    for path, scale in scales.items():
        assert scale == UpdateScale(decay=0.0 if path in vectors and not decay_vectors else 1.0)


@pytest.mark.parametrize("decay_vectors", [False, True])
@pytest.mark.parametrize(
    ("rule", "never"),
    [
        (HC(), {"static_alpha", "static_beta"}),
        (MHC(), {"b", "alpha_pre", "alpha_post", "alpha_res"}),
        (MHCNative(), {"pre_bias", "post_bias", "residual_bias"}),
        (MHCStatic(), {"H_pre_logits", "H_post_logits", "H_res_logits"}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_is_never_decayed(rule, never, decay_vectors):
    """The authors' exceptions, in their recipe, which decays norms, as in ours."""
    scales = scales_of(rule, decay_vectors=decay_vectors)
    undecayed = {path.rpartition("/")[2] for path, scale in scales.items() if scale.decay == 0}
    assert never <= undecayed
    assert (undecayed == never) == decay_vectors
    assert "norm" in undecayed or decay_vectors


def test_scales_reach_the_parameters_of_other_models():
    """By pattern, in a nested dict as in an nnx.State."""
    model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    optimizer = scaled_adamw({"layers/0/k*": UpdateScale(rate=0.5)}, weight_decay=0.0)
    state = nnx.state(model, nnx.Param)
    for params in (state, nnx.to_pure_dict(state)):
        ones = jax.tree.map(jnp.ones_like, params)
        updates, _ = optimizer.update(ones, optimizer.init(params), params)
        layer = nnx.to_pure_dict(updates) if params is state else updates
        layer = layer["layers"][0]
        np.testing.assert_allclose(layer["kernel"], 0.5, rtol=1e-5)
        np.testing.assert_allclose(layer["bias"], 1.0, rtol=1e-5)


@pytest.mark.parametrize(("rule", "a"), [(DepthMuP, 0.5), (CompleteP, 1.0)])
def test_depth_and_width_transfer(rule, a):
    """DepthBench's code, with L = 12 of 24 layers and D = 32 of 16."""
    deep, wide = 12 / 24, 32 / 16
    block_rate = deep ** (a - 1)
    for path, scale in scales_of(rule()).items():
        rate, eps = (block_rate, deep**-a) if is_of_block(path) else (1, 1)
        assert (scale.rate, scale.eps) == pytest.approx((rate, eps)), path
        assert scale.decay == (0 if path.startswith("residual/") else 1)
    for path, scale in scales_of(rule(base_width=16)).items():
        matrix = path.startswith(("attention/", "mlp/"))
        rate = block_rate / (wide if matrix else 1) if is_of_block(path) else 1
        eps = (deep**-a if is_of_block(path) else 1) / (1 if path.endswith("final/norm") else wide)
        assert (scale.rate, scale.eps) == pytest.approx((rate, eps)), path
        decay = 0 if path.startswith("residual/") else wide if matrix else 1
        assert scale.decay == pytest.approx(decay)


def is_of_block(path):
    """Whether a parameter belongs to the layers, not to embedding, head or final norm."""
    return path.startswith(("attention/", "mlp/", "residual/attention/", "residual/mlp/"))


def scales_of(rule: Residual, **train) -> dict[str, UpdateScale]:
    sizes = {"layers": 12, "width": 32, "heads": 2, "mlp_width": 16}
    model = ModelConfig(shape="custom", residual=rule, **sizes)
    config = Config(model=model, train=TrainConfig(**train))
    params = nnx.state(nnx.eval_shape(lambda: build_model(config, 11)), nnx.Param)
    return update_scales(params, config)


@pytest.mark.parametrize("scale", [UpdateScale(), UpdateScale(rate=0.5, eps=3.0, decay=2.0)])
def test_adamw_as_torch_computes_it(scale):
    """p <- p (1 - lr wd); p <- p - lr m^ / (sqrt(v^) + eps), after clipping by the global norm;
    each of lr, eps and wd times the factor of the parameter."""
    rng, eps, limit = np.random.default_rng(0), 1e-2, 1.0
    value, m, v = rng.normal(size=(3, 4)), np.zeros((3, 4)), np.zeros((3, 4))
    params = {"w": jnp.asarray(value, jnp.float32)}
    optimizer = scaled_adamw({"w": scale}, eps=eps, weight_decay=0.1)
    state = optimizer.init(params)
    for step in range(1, 8):
        gradient, rate = rng.normal(size=(3, 4)) * step / 3, 1e-2 / step
        clipped, norm = clip({"w": jnp.asarray(gradient, jnp.float32)}, limit)
        np.testing.assert_allclose(norm, np.linalg.norm(gradient), rtol=1e-5)
        updates, state = optimizer.update(clipped, state, params)
        params = optax.apply_updates(params, jax.tree.map(lambda u, r=rate: -r * u, updates))

        gradient = gradient / max(1.0, np.linalg.norm(gradient))
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        rate *= scale.rate
        value = value * (1 - rate * 0.1 * scale.decay)
        direction = m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.95**step)) + eps * scale.eps)
        value = value - rate * direction
        np.testing.assert_allclose(params["w"], value, rtol=1e-5, atol=1e-6)
