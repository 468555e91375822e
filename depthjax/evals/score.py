"""Log-likelihoods of completions under a model, in batches of like lengths."""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from depthjax.evals.pairs import Pair
from depthjax.evals.progress import Progress
from depthjax.infer import in_activation_dtype
from depthjax.models import Transformer

BATCH_TOKENS = 2**14
"""Tokens, padding included, that a device is given at a time, if one row has no more."""

CHUNK_LOGITS = 2**27
"""Most logits that a device holds at a time, if a token of each row has no more."""

CHUNK_TOKENS = 32
"""Most tokens of a completion at a time; many completions have few."""

_LIMITS = {"cpu": (2**11, 2**22)}  # what suits a cache of a few MB


class Scores(NamedTuple):
    """What a model makes of N pairs."""

    log_likelihood: np.ndarray
    """float64 [N]: natural logarithm of the completion's probability, 0 for an empty one."""
    greedy: np.ndarray
    """bool [N]: whether each token of the completion is the likeliest one."""


def log_likelihoods(
    model: Transformer,
    pairs: Sequence[Pair],
    *,
    skip: jax.Array | int | None = None,
    mesh: jax.sharding.Mesh | None = None,
    title: str | None = None,
) -> Scores:
    """sum over the completion's tokens of log p(token | all before it), for each pair.

    Pairs are sorted into a few lengths, padded on the right and never truncated; a pair may be
    longer than what the model was trained on. Only tokens of completions reach the head, a chunk at
    a time; logits and softmax are fp32.

    skip: leave out this layer; all layers share one compiled program. mesh: rows are divided over
    its axes `data` and `fsdp`, parameters replicated; None: one device. title: what the progress is
    called; None: no progress is shown.
    """
    likelihood, greedy = np.zeros(len(pairs)), np.ones(len(pairs), bool)
    devices = 1 if mesh is None else mesh.size
    tokens, logits = _LIMITS.get(jax.default_backend(), (BATCH_TOKENS, CHUNK_LOGITS))
    batches = list(_batches(pairs, tokens, devices))
    skip = None if skip is None else jnp.asarray(skip, jnp.int32)
    model = in_activation_dtype(model)
    place = None
    if mesh is not None:
        place = NamedSharding(mesh, P(tuple(a for a in ("data", "fsdp") if a in mesh.shape)))
        model = jax.device_put(model, NamedSharding(mesh, P()))
    on_mesh = contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)
    with on_mesh, Progress(title, sum(len(batch.rows) for batch in batches)) as progress:
        for batch in batches:
            arrays = jax.device_put(_arrays(pairs, batch), place)
            chunk = logits // (batch.size // devices * model.vocab)
            chunk = min(max(1, chunk), CHUNK_TOKENS, batch.length)
            sums, hits = jax.device_get(_score(model, *arrays, skip, chunk=chunk))
            count = len(batch.rows)
            likelihood[batch.rows], greedy[batch.rows] = sums[:count], hits[:count]
            progress.advance(count)
    return Scores(likelihood, greedy)


class _Batch(NamedTuple):
    rows: list[int]
    """Which pairs."""
    length: int
    """What they are padded to."""
    size: int
    """Rows, the empty ones at the end included."""


def _batches(pairs: Sequence[Pair], tokens: int, devices: int) -> Iterator[_Batch]:
    """The longest first, so that what does not fit shows at once; a power of two of rows a device,
    as many in all batches of a length, so that each length is one program."""
    by_length = defaultdict(list)
    for i, pair in enumerate(pairs):
        if pair.targets:
            by_length[_padded(len(pair.ids))].append(i)
    for length in sorted(by_length, reverse=True):
        rows = by_length[length]
        share = min(
            _power_of_two(-(-len(rows) // devices)), _power_of_two(tokens // length + 1) // 2
        )
        size = max(1, share) * devices
        yield from (_Batch(rows[i : i + size], length, size) for i in range(0, len(rows), size))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _padded(length: int) -> int:
    """The next of 32, 64, 128, 256, 384, 512, 768, 1024, 1536, ...: few programs to compile, and
    from 128 on whole blocks of the attention kernels."""
    power = max(32, _power_of_two(length))
    return power // 4 * 3 if power >= 512 and length <= power // 4 * 3 else power


def _arrays(pairs: Sequence[Pair], batch: _Batch) -> tuple[np.ndarray, ...]:
    """(ids [B, T], where completions start [B], how many tokens they have [B])."""
    ids = np.zeros((batch.size, batch.length), np.int32)
    starts, targets = np.ones(batch.size, np.int32), np.zeros(batch.size, np.int32)
    for row, pair in enumerate(pairs[i] for i in batch.rows):
        ids[row, : len(pair.ids)] = pair.ids
        starts[row], targets[row] = pair.start, pair.targets
    return ids, starts, targets


@functools.partial(jax.jit, static_argnames="chunk")
def _score(model, ids, starts, targets, skip, *, chunk) -> tuple[jax.Array, jax.Array]:
    """(log-likelihood fp32 [B], greedy bool [B]) of rows [B, T], `chunk` tokens of completions at a
    time."""
    features, _ = model.features(ids, skip=skip)
    batch, length = ids.shape
    wide = jnp.promote_types(model.dtype, jnp.float32)

    def add(carry):
        done, total, greedy = carry
        ahead = done + jnp.arange(chunk)
        # The token at `place` is predicted from the position before it.
        place = jnp.clip(starts[:, None] + ahead, 1, length - 1)
        x = jnp.take_along_axis(features, place[..., None] - 1, axis=1)
        logits = model.logits(x)
        token = jnp.take_along_axis(ids, place, axis=1)
        found = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
        real = ahead < targets[:, None]
        gained = jnp.where(real, found - jax.nn.logsumexp(logits, axis=-1), 0)
        hit = jnp.where(real, jnp.argmax(logits, axis=-1) == token, True)
        return done + chunk, total + gained.sum(axis=1), greedy & hit.all(axis=1)

    start = jnp.int32(0), jnp.zeros(batch, wide), jnp.ones(batch, bool)
    _, total, greedy = jax.lax.while_loop(lambda carry: carry[0] < targets.max(), add, start)
    return total, greedy
