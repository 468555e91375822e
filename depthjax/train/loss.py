"""Next-token cross entropy."""

import jax
import jax.numpy as jnp
import optax


def next_token_losses(logits: jax.Array, input_ids: jax.Array) -> jax.Array:
    """fp32 [B, T - 1]: -log p(token t + 1 | tokens 0..t) from logits [B, T, V]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], input_ids[:, 1:])


def summed_loss(logits: jax.Array, input_ids: jax.Array, lengths: jax.Array) -> jax.Array:
    """fp32 []: the losses of all predictions within each row's first `lengths` [B] tokens, summed.

    A row of n tokens has n - 1 predictions; a row of length 0 none.
    """
    losses = next_token_losses(logits, input_ids)
    predicted = jnp.arange(1, input_ids.shape[1])[None] < lengths[:, None]
    return jnp.sum(jnp.where(predicted, losses, 0.0))
