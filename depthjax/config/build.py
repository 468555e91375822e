"""The model that a config stands for."""

import math

import jax.numpy as jnp
from flax import nnx

from depthjax.config.fields import Config
from depthjax.models import Remat, Transformer


def build_model(config: Config, vocab: int) -> Transformer:
    """The freshly initialised network of a config."""
    model = config.model
    group = model.remat_group or round(math.sqrt(config.shape.layers))
    return Transformer(
        config.shape,
        vocab,
        config.residual,
        rope_theta=model.rope_theta,
        init_std=model.init_std,
        dtype=jnp.dtype(model.dtype),
        param_dtype=jnp.dtype(model.param_dtype),
        remat=Remat(model.remat, group),
        rngs=nnx.Rngs(model.init_seed),
    )
