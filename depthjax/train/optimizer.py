"""AdamW with warmup and cosine decay (DepthBench, "training recipe")."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from depthjax.config import TrainConfig


def learning_rate(step: jax.Array, train: TrainConfig, warmup: int) -> jax.Array:
    """fp32 rate of the 1-based `step` k, with W = `warmup`, N = train.steps, peak p, end e = p *
    ratio:

    k < W: p k / W;  W <= k < N: e + (p - e)(1 + cos(pi (k - W) / (N - W))) / 2;  k >= N: e.
    """
    k = jnp.asarray(step, jnp.float32)
    peak, end = train.peak_lr, train.peak_lr * train.final_lr_ratio
    progress = jnp.clip((k - warmup) / max(train.steps - warmup, 1), 0.0, 1.0)
    cosine = end + (peak - end) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
    return jnp.where(
        k >= train.steps, end, jnp.where(k < warmup, peak * k / max(warmup, 1), cosine)
    )


def decay_mask(params: nnx.State, decay_vectors: bool) -> Any:
    """True at the parameters that are decayed, as their `decay` metadata says (a pure dict)."""

    def decayed(variable: nnx.Variable) -> bool:
        group = variable.get_metadata()["decay"]
        return group == "matrix" or (decay_vectors and group == "vector")

    flat = {path: decayed(leaf) for path, leaf in nnx.to_flat_state(params)}
    mask: dict[str, Any] = {}
    for path, value in flat.items():
        node = mask
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return mask


def clip(gradient: Any, limit: float) -> tuple[Any, jax.Array]:
    """The gradient scaled down to a global L2 norm of at most `limit`, and its fp32 norm before."""
    norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), gradient))
    scale = jnp.minimum(1.0, limit / norm)
    return jax.tree.map(lambda g: (g * scale).astype(g.dtype), gradient), norm


def adamw(train: TrainConfig, mask: Any) -> optax.GradientTransformation:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019) for gradients that are clipped
    already; multiply its updates by the negative learning rate. Moments have the dtype of the
    parameters."""
    return optax.chain(
        optax.scale_by_adam(train.beta1, train.beta2, train.adam_eps),
        optax.add_decayed_weights(train.weight_decay, mask),
    )
