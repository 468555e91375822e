"""How large states and gradients are by depth."""

import jax
import jax.numpy as jnp
import numpy as np

from depthjax.models import Transformer
from depthjax.probes.fold import Batches, Fold, on_rows, zeros
from depthjax.probes.walk import at_boundaries, masked_sum, token_losses


def magnitudes(batches: Batches) -> Fold:
    """output_rms [L + 1]: of the running state, at first the embedding, then behind each layer;
    gradient_rms [2 L]: of the derivative of a window's mean loss by the output of each sublayer;
    loss [] (arXiv 2603.15031, which leaves its gradient magnitude undefined).
    """
    layers, width = batches.shape.layers, batches.shape.width

    def step(k, sums):
        for name, value in batches.call(_sizes, k).items():
            sums[name] += value

    def result(sums):
        elements = batches.tokens * width
        return {
            "output_rms": np.sqrt(sums["outputs"] / batches.tokens),
            "gradient_rms": np.sqrt(sums["gradients"] / elements),
            "loss": sums["loss"] / batches.windows,
        }

    start = zeros(outputs=(layers + 1,), gradients=(2 * layers,), loss=())
    return Fold(start, len(batches), step, result)


@on_rows
def _sizes(model: Transformer, ids, real):
    def look(rule, params, final, carry, history, s):
        stream = rule.stream(carry).astype(jnp.float32)
        return jnp.mean(stream * stream, axis=-1)

    def loss(meters):
        features, _ = model.features(ids, meters=meters)
        means = jnp.mean(token_losses(model.logits(features), ids), axis=-1)
        return jnp.sum(means * real)

    total, gradients = jax.value_and_grad(loss)(jnp.zeros((model.shape.layers, 2), jnp.float32))
    squares, _ = at_boundaries(model, ids, look)
    outputs = jax.vmap(masked_sum, (0, None))(squares, real)
    return {"outputs": outputs, "gradients": gradients.reshape(-1), "loss": total}
