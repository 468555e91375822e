"""Small models with random parameters, and the configs that describe them."""

import dataclasses

import jax
import numpy as np
from flax import nnx

from depthjax.config import Config, ModelConfig, build_model
from depthjax.residuals import PreLN


def small_config(residual=None, layers=3, dtype="float32", **model) -> Config:
    """A config of a tiny model with two query heads to a key."""
    sizes = {"shape": "custom", "layers": layers, "width": 16, "heads": 4, "mlp_width": 24}
    sizes |= {"kv_heads": 2, "vocab": 31, "context": 32, "dtype": dtype, "param_dtype": dtype}
    return Config(model=ModelConfig(**{**sizes, "residual": residual or PreLN(), **model})).check()


def random_model(config: Config, seed=0, scale=0.3):
    """The model of a config with every parameter random, those included whose init is constant."""
    model = build_model(config, config.model.vocab)
    keys = nnx.Rngs(seed)

    def draw(leaf):
        noise = scale * jax.random.normal(keys.params(), leaf.shape)
        return (leaf + noise).astype(leaf.dtype)

    nnx.update(model, jax.tree.map(draw, nnx.state(model, nnx.Param)))
    return model


def parameters(model) -> dict[str, np.ndarray]:
    """The parameters by path."""
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(path): np.asarray(leaf[...]) for path, leaf in state}


def assert_same(one, other):
    """Equal parameters to the bit, in equal dtypes."""
    one, other = parameters(one), parameters(other)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (other[name].dtype, other[name].shape) == (value.dtype, value.shape), name
        np.testing.assert_array_equal(other[name], value, err_msg=name)


def replaced(config: Config, **fields) -> Config:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **fields))
