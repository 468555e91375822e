"""What layers do for the loss: permutation score, layer pruning, LogitLens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from depthjax.models import Transformer
from depthjax.probes.fold import Batches, Fold, boundary_means, on_rows, zeros
from depthjax.probes.walk import (
    NONE,
    at_boundaries,
    depth_of,
    features_of,
    masked_sum,
    summed_loss,
    token_losses,
)

TOP = 5


def permutation_score(batches: Batches, swap: str = "full") -> Fold:
    """score [L, L], i < j: |loss with layers i and j exchanged - loss| / loss, and baseline_loss []
    (Kapl et al. 2025; DepthBench, section 7).

    swap: "full" moves all that belongs to a layer, by the rules of the residual connection;
    "routing" only the connectors of its streams, as the study's released script does.
    """
    layers = batches.shape.layers
    pairs = [(0, 0), *zip(*np.triu_indices(layers, 1), strict=True)]  # the first changes nothing
    swapped = {"full": _swapped_loss, "routing": _rerouted_loss}[swap]

    def step(k, sums):
        pair, batch = divmod(k, len(batches))
        sums["loss"][pairs[pair]] += batches.call(swapped, batch, *map(int, pairs[pair]))

    def result(sums):
        baseline = sums["loss"][0, 0]
        score = np.abs(sums["loss"] - baseline) / baseline
        score = np.where(np.triu(np.ones((layers, layers), bool), 1), score, np.nan)
        return {"score": score, "baseline_loss": baseline / batches.predictions}

    return Fold(zeros(loss=(layers, layers)), len(pairs) * len(batches), step, result)


@on_rows
def _swapped_loss(model: Transformer, ids, real, i, j):
    features = features_of(model, depth_of(model, swap=(i, j)), ids)
    return summed_loss(model, features, ids, real)


@on_rows
def _rerouted_loss(model: Transformer, ids, real, i, j):
    features = features_of(model, depth_of(model, swap_routing=(i, j)), ids)
    return summed_loss(model, features, ids, real)


def layer_pruning_loss(batches: Batches) -> Fold:
    """loss [L] with one layer left out, baseline_loss [], and delta [L], their difference (Gromov
    et al. 2024; DepthBench, section 7)."""
    layers = batches.shape.layers

    def step(k, sums):
        skip, batch = divmod(k, len(batches))
        skip = skip if skip < layers else NONE  # the last entry is the baseline
        sums["loss"][skip] += batches.call(_pruned_loss, batch, skip)

    def result(sums):
        *loss, baseline = sums["loss"] / batches.predictions
        return {"loss": np.array(loss), "baseline_loss": baseline, "delta": loss - baseline}

    return Fold(zeros(loss=(layers + 1,)), (layers + 1) * len(batches), step, result)


@on_rows
def _pruned_loss(model: Transformer, ids, real, skip):
    features = features_of(model, depth_of(model), ids, skip)
    return summed_loss(model, features, ids, real)


def logit_lens(batches: Batches) -> Fold:
    """cross_entropy, kl, top5_overlap, all [L + 1]: of the distribution that the head gives at each
    boundary of layers with the next token, and with the model's own distribution p: KL(p || lens)
    and the shared part of the five likeliest tokens (nostalgebraist 2020; DepthBench, section 7).
    """
    names = "cross_entropy", "kl", "top5_overlap"
    return boundary_means(batches, names, _lens, batches.predictions)


@on_rows
def _lens(model: Transformer, ids, real):
    """[L + 1, 3], summed over predictions; one boundary's logits at a time."""

    def look(rule, params, final, carry, history, s):
        return rule.lens(params, final, carry, history, s)

    def top(logits):
        return jax.lax.top_k(logits[:, :-1], min(TOP, model.vocab))[1]

    inputs, features = at_boundaries(model, ids, look)
    logits = model.logits(features)
    final, likeliest = jax.nn.log_softmax(logits[:, :-1]), top(logits)
    total = functools.partial(masked_sum, real=real)

    def measure(x):
        logits = model.logits(x)
        kl = jnp.sum(jnp.exp(final) * (final - jax.nn.log_softmax(logits[:, :-1])), axis=-1)
        same = top(logits)[..., :, None] == likeliest[..., None, :]
        overlap = jnp.sum(same, axis=(-2, -1)) / likeliest.shape[-1]
        return jnp.stack([total(token_losses(logits, ids)), total(kl), total(overlap)])

    return jax.lax.map(measure, inputs)
