"""Bytes of the model and of its states, by formula."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from depthjax.config import Config
from depthjax.models import Shape
from depthjax.residuals import Residual, init_params


def key_value_bytes(shape: Shape, tokens: int, itemsize: int, residual: Residual) -> int:
    """What decoding keeps of one sequence: 2 L T K E elements, keys and values (DepthBench,
    appendix D), and what the residual connection keeps beside them."""
    elements = 2 * shape.layers * shape.kv_heads * shape.head_dim
    return tokens * itemsize * (elements + residual.kept_per_token(shape.layers, shape.width))


def cache_bytes(config: Config, tokens: int) -> int:
    """`key_value_bytes` of a config, in the dtype of its activations."""
    itemsize = jnp.dtype(config.model.dtype).itemsize
    return key_value_bytes(config.shape, tokens, itemsize, config.residual)


def decoding_parameter_bytes(config: Config, counts: Mapping[str, int]) -> int:
    """Of parameters, counted by part, as decoding holds them: matrices in the dtype of the
    activations, what belongs to the residual connection as it was trained."""
    residual = counts["residual"]
    matrices = (sum(counts.values()) - residual) * jnp.dtype(config.model.dtype).itemsize
    trained = residual * jnp.dtype(config.model.param_dtype).itemsize
    return matrices + trained + _pinned_bytes(config)


def _pinned_bytes(config: Config) -> int:
    """What parameters that stay in fp32, whatever `param_dtype` is, take beyond it."""

    dtype = jnp.dtype(config.model.param_dtype)
    sizes = {"layers": config.shape.layers, "width": config.shape.width}
    make = functools.partial(init_params, config.residual, param_dtype=dtype, **sizes)
    leaves = jax.tree.leaves(jax.eval_shape(make, jax.random.key(0)))
    return sum(x.size * (x.dtype.itemsize - dtype.itemsize) for x in leaves)


@dataclasses.dataclass(frozen=True)
class TrainingBytes:
    """What training holds whatever the batch, and what it holds a token."""

    parameters: int
    optimizer: int
    """Adam's two moments, in the dtype of the parameters."""
    gradient: int
    logits_per_token: int
    """In fp32, as the loss sees them."""
    depth_state_per_token: int
    """Carry and history of the residual connection."""
    layer_inputs_per_token: int
    """The carry that enters each layer, which is what rematerialisation keeps."""


def training_bytes(config: Config, vocab: int, parameters: int) -> TrainingBytes:
    """Of a config with so many parameters."""
    shape, residual = config.shape, config.residual
    kept = parameters * jnp.dtype(config.model.param_dtype).itemsize + _pinned_bytes(config)
    dtype = jnp.dtype(config.model.dtype)
    carry = residual.carry_bytes_per_token(shape.layers, shape.width, dtype)
    return TrainingBytes(
        parameters=kept,
        optimizer=2 * kept,
        gradient=kept,
        logits_per_token=4 * vocab,
        depth_state_per_token=residual.state_bytes_per_token(shape.layers, shape.width, dtype),
        layer_inputs_per_token=shape.layers * carry,
    )
