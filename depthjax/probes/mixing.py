"""How a read is made of all that came before: path weights, depth mixing matrix, transport."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from depthjax.models import Transformer
from depthjax.probes.fold import Batches, Fold, on_rows, zeros
from depthjax.probes.walk import Depth, depth_of, masked_sum, walk
from depthjax.residuals import ATTENTION, KINDS, MLP
from depthjax.residuals.base import Paths

SAMPLED = 8
"""Tokens whose own mixing matrix is taken to pieces."""

RANK_TOLERANCE = 1e-4
"""Singular values below this share of the largest count as zero."""


def path_weights(batches: Batches) -> Fold:
    """weights [2 L + 1, 2 L]: how much of source i (row 0: the embedding, row i + 1: the output of
    sublayer i) the input of sublayer l (column) contains, a mean over tokens (DepthBench, section
    7). It is the product of what is written, transported and read on the way."""
    fold = mixing_matrix(batches)

    def result(sums):
        return {"weights": fold.result(sums)["matrix"][:-1].T}

    return Fold(fold.sums, fold.steps, fold.step, result)


def mixing_matrix(batches: Batches) -> Fold:
    """The depth mixing matrix h_l = sum_i M[l, i] v_i of R = 2 L + 1 readers (the last is the final
    read) and as many sources (the first is the embedding): arXiv 2603.15031.

    matrix [R, R]: the mean of M over tokens, NaN above the diagonal; singular_values [R] of it. Of
    the weights |M| of each token, normalised to sum 1, means over tokens, all [R]: entropy in nats;
    look_back, the distance in sublayers, 1 from the newest source; embedding_weight. rank [] and
    semiseparable_rank []: the numerical ranks of M and, largest, of a block M[k:, :k + 1], means
    over a few tokens: a scheme with m streams has semiseparable rank m at most.
    """
    readers = 2 * batches.shape.layers + 1

    def step(k, sums):
        found = batches.call(_mixing, k)
        sample = found.pop("sample")
        if k == 0:
            sums["sample"] += np.moveaxis(sample, 1, 0)
        for name, value in found.items():
            sums[name] += value

    def result(sums):
        means = {name: sums[name] / batches.tokens for name in sums if name != "sample"}
        below = np.tril(np.ones((readers, readers), bool))
        # A row of zeros, as of a network whose branches write nothing yet, looks back nowhere.
        return {
            **means,
            "matrix": np.where(below, means["matrix"], np.nan),
            "singular_values": np.linalg.svd(means["matrix"], compute_uv=False),
            "rank": np.mean([_rank(m) for m in sums["sample"]]),
            "semiseparable_rank": np.mean([semiseparable_rank(m) for m in sums["sample"]]),
        }

    by_reader = (readers,)
    tokens = min(SAMPLED, batches.length)
    start = zeros(
        matrix=(readers, readers),
        entropy=by_reader,
        look_back=by_reader,
        embedding_weight=by_reader,
        sample=(tokens, readers, readers),
    )
    return Fold(start, len(batches), step, result)


def _rank(matrix: np.ndarray) -> int:
    sigma = np.linalg.svd(matrix, compute_uv=False)
    return int(np.sum(sigma > RANK_TOLERANCE * sigma[0]))


def semiseparable_rank(matrix: np.ndarray) -> int:
    """The largest numerical rank of a block on or below the diagonal, M[k:, :k + 1]."""
    return max(_rank(matrix[k:, : k + 1]) for k in range(len(matrix)))


@on_rows
def _mixing(model: Transformer, ids, real):
    """Sums over tokens of all readers [R, ...], and the rows of sampled tokens [R, n, R]."""
    depth = depth_of(model)
    shape = _coefficients_shape(model, depth, ids)
    start = jnp.zeros(shape, jnp.float32).at[..., 0].set(depth.rule.slots(depth.layers))

    def layer(loop, index, params):
        state, coefficients = loop
        seen = []
        for kind in (ATTENTION, MLP):
            s = 2 * index + kind
            after, paths = _sublayer(depth, kind, params, state, s)
            seen.append(_read(paths, coefficients, real, ids.shape, s))
            written = paths.write[..., None] * jax.nn.one_hot(s + 1, shape[-1])
            kept = jnp.matmul(paths.keep, coefficients, precision="highest")
            state, coefficients = after, (kept + written).astype(coefficients.dtype)
        return (state, coefficients), jax.tree.map(lambda *both: jnp.stack(both), *seen)

    state = depth.rule.begin(model.embedded(ids), depth.layers)
    inputs = jnp.arange(depth.layers, dtype=jnp.int32), depth.params
    (state, coefficients), seen = jax.lax.scan(
        lambda loop, inputs: layer(loop, *inputs), (state, start), inputs
    )
    final = depth.rule.paths(depth.final, state, None, None, None)
    last = _read(final, coefficients, real, ids.shape, 2 * depth.layers)
    return jax.tree.map(
        lambda all_, one: jnp.concatenate([all_.reshape(-1, *all_.shape[2:]), one[None]]),
        seen,
        last,
    )


def _sublayer(depth: Depth, kind: int, params, state, s) -> tuple[Any, Paths]:
    """(the state behind sublayer s, its linear moves)."""
    sublayers = depth.sublayers
    x, ctx, *read = sublayers.read(kind, params, *state, s)
    y, aux = sublayers.branch(kind, params, x, ctx)
    after = sublayers.written(kind, params, tuple(read), y, aux, s)
    return after, depth.rule.paths(params.residual[KINDS[kind]], state, y, after, s)


def _coefficients_shape(model: Transformer, depth: Depth, ids) -> tuple[int, ...]:
    """[..., K, R] of what the slots hold of each source: a token, or for all alike where the moves
    do not depend on it."""

    def keep():
        state = depth.rule.begin(model.embedded(ids), depth.layers)
        first = jax.tree.map(lambda leaf: leaf[0], depth.params)
        return _sublayer(depth, ATTENTION, first, state, jnp.int32(0))[1].keep

    return (*jax.eval_shape(keep).shape[:-1], 2 * depth.layers + 1)


def _read(paths: Paths, coefficients, real, tokens: tuple[int, int], s) -> dict[str, jax.Array]:
    """What reader s sees, as sums over tokens, and the weights of sampled tokens [n, R]."""
    weights = jnp.einsum("...k,...kr->...r", paths.read, coefficients, precision="highest")
    weights = jnp.broadcast_to(weights, (*tokens, weights.shape[-1]))
    size = jnp.abs(weights)
    share = size / jnp.maximum(jnp.sum(size, axis=-1, keepdims=True), jnp.finfo(size.dtype).tiny)
    distance = jnp.maximum(s + 1 - jnp.arange(weights.shape[-1]), 0)
    entropy = -jnp.sum(jax.scipy.special.xlogy(share, share), axis=-1)
    chosen = np.linspace(0, tokens[1] - 1, min(SAMPLED, tokens[1])).astype(int)
    return {
        "matrix": masked_sum(weights, real),
        "entropy": masked_sum(entropy, real),
        "look_back": masked_sum(share @ distance.astype(share.dtype), real),
        "embedding_weight": masked_sum(share[..., 0], real),
        "sample": weights[0, chosen],
    }


def newest_source_weight(batches: Batches) -> Fold:
    """weight [2 L]: the mean softmax weight of readers 1 ... 2 L on their last source, the running
    sum, and sources [2 L], how many each mixes (DepthBench, section 7)."""
    layers = batches.shape.layers
    readers = np.arange(1, 2 * layers + 1)
    closed = np.array(batches.rule.boundaries(layers))
    sources = 1 + np.sum(closed < readers[:, None], axis=1)

    def step(k, sums):
        sums["weight"] += batches.call(_newest, k)

    def result(sums):
        return {"weight": sums["weight"] / batches.tokens, "sources": sources.astype(np.float64)}

    return Fold(zeros(weight=(2 * layers,)), len(batches), step, result)


@on_rows
def _newest(model: Transformer, ids, real):
    """[2 L], summed over tokens; the first reader has one source."""

    def observer(rule, params, carry, history, s):
        return rule.observe(params, carry, history, s)["weights"][-1]

    state, seen, depth = _observed(model, ids, observer)
    last = observer(depth.rule, depth.final, *state, None)
    weights = jnp.concatenate([seen[1:], last[None]])
    return jax.vmap(masked_sum, (0, None))(weights, real)


def _observed(model: Transformer, ids, observer) -> tuple[Any, Any, Depth]:
    """(the state behind all layers, what was observed of sublayers [2 L, ...], the model)."""
    depth = depth_of(model, observer=observer)

    def layer(state, index, params):
        after, seen, _ = depth.sublayers.layer(params, state, index)
        return after, seen

    state, seen = walk(model, depth, ids, layer)
    return state, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), seen), depth


def transport_effective_rank(batches: Batches) -> Fold:
    """Of the product of all 2 L transports of a token, A_0 A_1 ..., with singular values sigma:
    effective_rank [W, T], exp of the entropy of sigma / sum sigma; singular_values [W, T, m]; and
    stream_cosine [W, T], the mean |cos| between the directions that the m streams end in
    (DepthBench, section 7)."""
    streams, tokens = (
        len(batches.rule.slots(batches.shape.layers)),
        (batches.windows, batches.length),
    )

    def step(k, sums):
        rows = batches.real(k)
        for name, value in batches.call(_transport, k).items():
            sums[name][rows] = value[: rows.stop - rows.start]

    start = zeros(effective_rank=tokens, singular_values=(*tokens, streams), stream_cosine=tokens)
    return Fold(start, len(batches), step, lambda sums: sums)


@on_rows
def _transport(model: Transformer, ids, real):
    def observer(rule, params, carry, history, s):
        return rule.observe(params, carry, history, s)["transport"]

    _, transports, _ = _observed(model, ids, observer)

    def further(product, transport):
        return jnp.matmul(transport, product, precision="highest"), None

    product, _ = jax.lax.scan(further, transports[0], transports[1:])
    sigma = jnp.linalg.svd(product, compute_uv=False)
    share = sigma / jnp.sum(sigma, axis=-1, keepdims=True)
    entropy = -jnp.sum(jax.scipy.special.xlogy(share, share), axis=-1)
    return {
        "effective_rank": jnp.exp(entropy),
        "singular_values": sigma,
        "stream_cosine": _mean_cosine(product),
    }


def _mean_cosine(product: jax.Array) -> jax.Array:
    """The mean |cos| between different columns of [..., m, m]: column s is where stream s ends."""
    tiny = jnp.finfo(product.dtype).tiny
    units = product / jnp.maximum(jnp.linalg.norm(product, axis=-2, keepdims=True), tiny)
    cosines = jnp.abs(jnp.einsum("...ts,...tr->...sr", units, units, precision="highest"))
    size = cosines.shape[-1]
    pairs = jnp.sum(cosines * (1 - jnp.eye(size)), axis=(-2, -1))
    return pairs / max(size * (size - 1), 1)
