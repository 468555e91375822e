"""Next-token cross entropy."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from depthjax.models import Transformer


def next_token_losses(
    model: Transformer, input_ids: jax.Array, **options: Any
) -> tuple[jax.Array, Any]:
    """fp32 [B, T - 1]: -log p(token t + 1 | tokens 0..t) of input_ids int32 [B, T], and what the
    observer saw; options as in `Transformer.features`. The last position, which predicts nothing,
    gets no logits.
    """
    features, seen = model.features(input_ids, **options)
    logits = model.logits(features[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, input_ids[:, 1:]), seen


def summed_loss(model: Transformer, input_ids: jax.Array, lengths: jax.Array) -> jax.Array:
    """fp32 []: the losses of all predictions within each row's first `lengths` [B] tokens, summed.

    A row of n tokens has n - 1 predictions; a row of length 0 none.
    """
    losses, _ = next_token_losses(model, input_ids)
    predicted = jnp.arange(1, input_ids.shape[1])[None] < lengths[:, None]
    return jnp.sum(jnp.where(predicted, losses, 0.0))
