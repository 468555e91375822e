"""Another residual connection under a trained model, where that leaves its function as it is.

With all queries zero a mixture of n sources is their sum over n, the plain stream h / n, and the
norm behind it undoes the n (Attention Residuals, arXiv 2603.15031). Only the epsilon is
left: norm(h / n) = h / sqrt(mean(h^2) + n^2 eps'), where the plain model has eps. One eps' cannot
meet all n, so it is fitted to the sizes that the stream has:

    eps' = eps sum_s n_s^2 w_s / sum_s n_s^4 w_s,    w_s = 1 / mean(h^2)^2 at reader s,

the least squares of what the inputs of the branches are scaled by. Hyper-Connections start as
copies of the plain stream, of which each branch reads one.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from depthjax.config import Config, build_model
from depthjax.errors import InputError
from depthjax.models import Transformer
from depthjax.residuals import HC, BlockAttnRes, FullAttnRes, PreLN, Residual


def with_residual(
    config: Config, model: Transformer, residual: Residual
) -> tuple[Config, Transformer]:
    """The model with `residual` in place of its plain stream: the same function, new parameters at
    their init. residual: FullAttnRes, BlockAttnRes or HC; it takes the epsilon of the model.

    Raises InputError for other residual connections on either side, and for a model with parameters
    that are not finite.
    """
    if type(config.residual) is not PreLN:
        raise InputError(
            f"model.residual is {config.residual.name!r}: only a {PreLN.name} checkpoint keeps its "
            "function under another residual connection"
        )
    kept = (FullAttnRes, BlockAttnRes, HC)
    if not isinstance(residual, kept):
        names = ", ".join(kind.name for kind in kept)
        raise InputError(
            f"--to-residual is {residual.name!r}, which would compute another function: choose "
            f"from {names}"
        )
    trained = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    for path, leaf in trained.items():
        if not jnp.all(jnp.isfinite(leaf[...])):
            raise InputError(
                f"the checkpoint's parameters are not finite ({'/'.join(path)} is the first with "
                "nan or inf): give another checkpoint"
            )
    eps = config.residual.eps
    config = _changed(config, dataclasses.replace(residual, eps=eps))
    if not isinstance(residual, HC):
        mix_eps = _fitted_eps(model, config.residual, eps)
        config = _changed(config, dataclasses.replace(config.model.residual, mix_eps=mix_eps))
    fresh = build_model(config, config.model.vocab)
    state = nnx.to_flat_state(nnx.state(fresh, nnx.Param))
    copied = {path: trained.get(path, leaf) for path, leaf in state}
    nnx.update(fresh, nnx.from_flat_state(copied))
    return config, fresh


def _changed(config: Config, residual: Residual) -> Config:
    """The config with another residual connection; InputError where that does not fit."""
    model = dataclasses.replace(config.model, residual=residual)
    return dataclasses.replace(config, model=model).check()


def random_ids(vocab: int) -> np.ndarray:
    """Token ids int32 [2, 64] to compare two models on; the same for every call."""
    return np.random.default_rng(0).integers(vocab, size=(2, 64), dtype=np.int32)


def largest_difference(one: Transformer, other: Transformer) -> float:
    """The largest difference of log-probabilities on random token ids, computed in fp32."""
    ids = random_ids(one.vocab)
    apart = [_compute(model, lambda m: jax.nn.log_softmax(m(ids))) for model in (one, other)]
    return float(jnp.max(jnp.abs(apart[0] - apart[1])))


def _compute(model: Transformer, function: Callable[[Transformer], Any]) -> Any:
    """`function` of the model with its activations in fp32."""
    graph, state = nnx.split(model)

    @jax.jit
    def run(state: nnx.State) -> Any:
        merged = nnx.merge(graph, state)
        merged.dtype = jnp.float32
        return function(merged)

    with jax.default_matmul_precision("highest"):
        return run(state)


def _fitted_eps(model: Transformer, residual: Any, eps: float) -> float:
    """The epsilon of the mixtures under which zero queries change least (two digits of it)."""

    def squares(rule, params, carry, history, s) -> jax.Array:
        return jnp.mean(jnp.square(rule.stream(carry)), axis=-1)

    ids = random_ids(model.vocab)
    _, (sublayers, last) = _compute(model, lambda m: m.features(ids, observer=squares))
    square = np.concatenate([np.asarray(sublayers), np.asarray(last)[None]]).astype(np.float64)
    weight = np.mean(1 / (square + eps) ** 2, axis=(1, 2))[1:]  # the first read mixes nothing
    sources = np.asarray([float(residual.sources(s)) for s in range(1, len(weight) + 1)])
    if not np.all(weight > 0):  # nan among them
        raise InputError(
            "the checkpoint's residual stream is not finite on random token ids: give another "
            "checkpoint"
        )
    fitted = eps * np.sum(sources**2 * weight) / np.sum(sources**4 * weight)
    return float(f"{fitted:.1e}")
