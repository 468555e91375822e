"""AdamW with warmup and cosine decay (DepthBench, section 2), by groups of parameters."""

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from depthjax.config import Config, TrainConfig
from depthjax.kernels.over_mesh import platform
from depthjax.residuals import UpdateScale


def learning_rate(step: jax.Array, train: TrainConfig, peak: float, warmup: int) -> jax.Array:
    """fp32 rate of the 1-based `step` k, with W = `warmup`, N = train.steps, peak p, end e = p *
    ratio:

    k < W: p k / W;  W <= k < N: e + (p - e)(1 + cos(pi (k - W) / (N - W))) / 2;  k >= N: e.
    """
    k = jnp.asarray(step, jnp.float32)
    end = peak * train.final_lr_ratio
    progress = jnp.clip((k - warmup) / max(train.steps - warmup, 1), 0.0, 1.0)
    cosine = end + (peak - end) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
    return jnp.where(
        k >= train.steps, end, jnp.where(k < warmup, peak * k / max(warmup, 1), cosine)
    )


def update_scales(params: nnx.State, config: Config) -> dict[str, UpdateScale]:
    """Parameter path ("residual/mlp/norm") -> how its update differs from the recipe's.

    The residual connection's factors, by the first of its patterns that matches, with decay 0 for
    parameters whose `decay` metadata says that they are not decayed.
    """
    shape = config.shape
    patterns = config.residual.update_scales(shape.layers, shape.width)
    decayed = ("matrix", "vector") if config.train.decay_vectors else ("matrix",)
    scales = {}
    for keys, variable in nnx.to_flat_state(params):
        path = "/".join(keys)
        scale = _matching(patterns, path)
        is_decayed = variable.get_metadata()["decay"] in decayed
        scales[path] = scale if is_decayed else dataclasses.replace(scale, decay=0.0)
    return scales


def _matching(scales: Mapping[str, UpdateScale], path: str) -> UpdateScale:
    """The scale of the first pattern that matches; one that changes nothing where none does."""
    matching = (scale for p, scale in scales.items() if fnmatch.fnmatchcase(path, p))
    return next(matching, UpdateScale())


def clip(gradient: Any, limit: float) -> tuple[Any, jax.Array]:
    """The gradient scaled down to a global L2 norm of at most `limit`, and its fp32 norm before."""
    norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), gradient))
    scale = jnp.minimum(1.0, limit / norm)
    return jax.tree.map(lambda g: (g * scale).astype(g.dtype), gradient), norm


def scaled_adamw(
    scales: Mapping[str, UpdateScale],
    *,
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> optax.GradientTransformationExtraArgs:
    """AdamW (Loshchilov & Hutter 2019) in which each parameter p has factors of its own:

        rate * (m^ / (sqrt(v^) + eps * scale.eps) + weight_decay * scale.decay * p)

    with `rate` the parameter's scale.rate. Multiply the updates by the negative learning rate;
    gradients are expected to be clipped already. scales: by pattern of the path ("mlp/*") in the
    nested dict or nnx.State of parameters, the first that matches; others are left as they are.
    Moments have the dtype of the parameters. `update(..., trusted=False)` leaves the state as it
    was; its updates are then of no use.
    """
    # Epsilon k eps on g is epsilon eps on g / k: one Adam serves all groups.
    divide = _at_each(scales, lambda scale, g, p: g / scale.eps)
    decay = _at_each(scales, lambda scale, u, p: scale.rate * (u + weight_decay * scale.decay * p))
    return optax.chain(divide, _adam(beta1, beta2, eps), decay)


def _adam(beta1: float, beta2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam`, whose state stays as it was where `trusted` is False."""
    adam = optax.scale_by_adam(beta1, beta2, eps)

    def update(gradient, state, params=None, *, trusted=True, **_):
        updates, new = adam.update(gradient, state, params)
        new = jax.tree.map(lambda new, old: jnp.where(trusted, new, old), new, state)
        if platform() == "cpu":
            # XLA's CPU compiler fuses by result. Updates that read the old moments would be one
            # more reader of them, and the new ones be written to copies instead of in place.
            new = jax.lax.optimization_barrier(new)
            mean = optax.tree.bias_correction(new.mu, beta1, new.count)
            square = optax.tree.bias_correction(new.nu, beta2, new.count)
            updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mean, square)
        return updates, new

    return optax.GradientTransformationExtraArgs(adam.init, update)


def _at_each(scales: Mapping[str, UpdateScale], function) -> optax.GradientTransformation:
    """updates -> function(scale, update, parameter), each in the dtype of the update."""

    def update(updates: Any, params: Any) -> Any:
        def at(path, u, p):
            if isinstance(path[-1], jax.tree_util.GetAttrKey):  # of an nnx.State: the Variable's
                path = path[:-1]
            scale = _matching(scales, jax.tree_util.keystr(path, simple=True, separator="/"))
            return function(scale, u, p).astype(u.dtype)

        return jax.tree_util.tree_map_with_path(at, updates, params)

    return optax.stateless(update)


def adamw(params: nnx.State, config: Config) -> optax.GradientTransformationExtraArgs:
    """The optimizer of a config for the parameters of its model."""
    train = config.train
    return scaled_adamw(
        update_scales(params, config),
        beta1=train.beta1,
        beta2=train.beta2,
        eps=train.adam_eps,
        weight_decay=train.weight_decay,
    )
