"""How the state moves with depth: angular distance, causal score, token collapse."""

import jax
import jax.numpy as jnp
import numpy as np

from depthjax.models import Transformer
from depthjax.probes.fold import Batches, Fold, boundary_means, on_rows, zeros
from depthjax.probes.walk import NONE, at_boundaries, depth_states, masked_sum

CAUSAL_EPS = 1e-8


def angular_distance(batches: Batches) -> Fold:
    """distance [L + 1, L + 1]: d(i, j) = mean over tokens of arccos(cos(z_i, z_j)) / pi for i < j
    (Gromov et al. 2024; DepthBench, section 7)."""
    states = batches.shape.layers + 1

    def step(k, sums):
        sums["angle"] += batches.call(_angles, k)

    def result(sums):
        distance = sums["angle"] / np.pi / batches.tokens
        return {"distance": np.where(_above(states), distance, np.nan)}

    return Fold(zeros(angle=(states, states)), len(batches), step, result)


@on_rows
def _angles(model: Transformer, ids, real):
    """[L + 1, L + 1]: angles summed over tokens, of the unit vectors' sum and difference: the
    arccosine would lose half of the digits where states hardly differ."""
    states = depth_states(model, ids)
    norms = jnp.linalg.norm(states, axis=-1, keepdims=True)
    units = states / jnp.maximum(norms, jnp.finfo(jnp.float32).tiny)

    def row(unit):
        apart = jnp.linalg.norm(units - unit, axis=-1)
        together = jnp.linalg.norm(units + unit, axis=-1)
        return 2 * jnp.arctan2(apart, together)  # [L + 1, b, T]

    return jax.lax.map(lambda unit: jax.vmap(masked_sum, (0, None))(row(unit), real), units)


def causal_score(batches: Batches) -> Fold:
    """score [L, L]: C(s, l), l > s = mean over tokens of |u_l without layer s - u_l| / |u_l|, where
    u_l = z_{l+1} - z_l is what layer l adds (Csordas et al. 2025; DepthBench, section 7)."""
    layers = batches.shape.layers
    skips = max(layers - 1, 1)  # nothing comes after the last layer
    plain: dict[int, jax.Array] = {}

    def step(k, sums):
        batch, skip = divmod(k, skips)
        if batch not in plain:
            plain.clear()
            plain[batch] = batches.on_devices(_updates, batch, NONE)
        sums["change"][skip] += batches.call(_changes, batch, skip, plain[batch])

    def result(sums):
        score = sums["change"] / batches.tokens
        return {"score": np.where(_above(layers), score, np.nan)}

    return Fold(zeros(change=(layers, layers)), len(batches) * skips, step, result)


@on_rows
def _updates(model: Transformer, ids, real, skip):
    """[L, b, T, D']: what each layer adds to the state, with one layer left out."""
    return _added(model, ids, skip)


@on_rows
def _changes(model: Transformer, ids, real, skip, plain):
    """[L]: relative change of what each layer adds, summed over tokens."""
    changed = jnp.linalg.norm(_added(model, ids, skip) - plain, axis=-1)
    size = jnp.maximum(jnp.linalg.norm(plain, axis=-1), CAUSAL_EPS)
    return jax.vmap(masked_sum, (0, None))(changed / size, real)


def _added(model: Transformer, ids, skip):
    return jnp.diff(depth_states(model, ids, skip), axis=0)


def token_collapse(batches: Batches) -> Fold:
    """stable_rank, effective_rank, l1_over_l2, all [L + 1]: of the tokens of a window as a matrix
    [T, D] (uncentred), with singular values sigma: sum sigma^2 / sigma_1^2, exp of the entropy of
    sigma^2 / sum sigma^2, and sum sigma / sqrt(sum sigma^2); means over windows (DepthBench)."""
    names = "stable_rank", "effective_rank", "l1_over_l2"
    return boundary_means(batches, names, _collapse, batches.windows)


@on_rows
def _collapse(model: Transformer, ids, real):
    """[L + 1, 3], summed over windows."""

    def look(rule, params, final, carry, history, s):
        return rule.layer_tensor(carry).astype(jnp.float32)

    states, _ = at_boundaries(model, ids, look)
    sigma = jnp.linalg.svd(states, compute_uv=False)  # [L + 1, b, min(T, D)]
    energy = jnp.sum(sigma**2, axis=-1)
    share = sigma**2 / energy[..., None]
    entropy = -jnp.sum(jax.scipy.special.xlogy(share, share), axis=-1)
    length = jnp.sum(sigma, axis=-1) / jnp.sqrt(energy)
    measures = jnp.stack([energy / sigma[..., 0] ** 2, jnp.exp(entropy), length], axis=-1)
    return jnp.sum(jnp.where(real[:, None], measures, 0), axis=1)


def _above(size: int) -> np.ndarray:
    """bool [size, size]: above the diagonal."""
    return np.triu(np.ones((size, size), bool), 1)
