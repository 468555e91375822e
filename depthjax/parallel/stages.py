"""A network's depth as `models.depth.run_depth` has it, over the stages of a pipeline."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from depthjax.config import MeshConfig
from depthjax.kernels.over_mesh import BATCH_AXES, STAGE, dividing, free_axes
from depthjax.models.depth import run_depth
from depthjax.models.keep import KEEP_ALL, Remat
from depthjax.models.sublayers import LayerParams, Sublayers
from depthjax.parallel.handoff import Exchange
from depthjax.parallel.pipeline import Pipeline
from depthjax.parallel.schedule import Keeps, Rows, Schedule

PRESENT = "present"
"""Beside a layer's residual parameters: False where it only fills up a shorter chunk."""


@dataclasses.dataclass(frozen=True)
class UnevenSublayers(Sublayers):
    """Sublayers of which those of a layer that is not `PRESENT` change nothing."""

    def read(self, kind, params, carry, history, s):
        x, ctx, after, history = super().read(kind, params, carry, history, s)
        return x, ctx, _where(params.residual[PRESENT], after, carry), history

    def write(self, kind, params, carry, y, aux, s):
        present = params.residual[PRESENT]
        after, appended = super().write(kind, params, carry, y, aux, s)
        if appended is not None:
            rows, slot, flag = appended
            appended = rows, slot, flag & present
        return _where(present, after, carry), appended

    def phases(self):
        return None


def _where(present: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(present, a, b), new, old)


def over_stages(config: MeshConfig, stages: int) -> Callable:
    """What goes through the layers on a mesh of so many stages, as `models.depth.run_depth` does;
    ValueError where the microbatches do not fit."""
    if stages == 1:
        return run_depth
    schedule = Schedule(stages, config.virtual_stages, config.microbatches or stages)
    return functools.partial(run_stages, schedule)


def run_stages(
    schedule: Schedule,
    sublayers: Sublayers,
    residual_params: dict[str, Any],
    branch_params: tuple[Any, Any],
    embedding: jax.Array,
    *,
    layers: int,
    remat: Remat = KEEP_ALL,
    unroll: bool = False,
    skip: jax.Array | int | None = None,
    meters: jax.Array | None = None,
    keeps: Keeps = "all",
) -> tuple[jax.Array, None, None]:
    """`models.depth.run_depth` under a mesh with the axis `stage`: what the head reads [B, T, D] of
    an embedding [B, T, D].

    keeps: which rows a stage still holds at its next pass. Differentiable in reverse mode: of each
    chunk and microbatch the input is kept, and `remat` says what else is while it is computed
    again. Raises ValueError with one sentence where layers or batch do not fit the
    schedule, and for what needs the whole depth in one place: an observer, `skip`, `unroll`.
    """
    batch, count = embedding.shape[0], schedule.microbatches
    if batch % count:
        raise ValueError(f"the batch has {batch} rows, which {count} microbatches do not divide")
    if unroll or skip is not None or sublayers.observer is not None:
        raise ValueError("stages hold only their own layers: no observer, skip or unroll there")
    chunks = schedule.layers(layers)
    params = LayerParams.stacked(residual_params, branch_params, meters)
    params = jax.tree.map(lambda leaf: _by_stage(schedule, chunks, leaf), params)
    if len(set(map(len, chunks))) > 1:
        params = params._replace(residual={**params.residual, PRESENT: _present(schedule, chunks)})
        sublayers = UnevenSublayers(sublayers.rule, sublayers.branches)
    rows = _microbatches(schedule, embedding)
    first = tuple(chunk.start for chunk in chunks)
    written = tuple(sublayers.rule.rows_before(2 * layer) for layer in first)
    pipeline = Pipeline(
        Exchange(schedule, Rows(schedule, written, keeps)),
        sublayers,
        remat,
        functools.partial(sublayers.rule.begin, layers=layers),
        jax.ShapeDtypeStruct(rows.shape[2:], rows.dtype),
        first,
    )
    features = pipeline.run(params, residual_params["final"], rows)
    return _batch(schedule, features), None, None


def _microbatches(schedule: Schedule, batch: jax.Array) -> jax.Array:
    """[P, M / P, B / M, ...] of a batch [B, ...]: each stage's share of the rows is its share of
    every P microbatches, and each microbatch lies over the other axes of the mesh as the batch."""
    shares = batch.reshape(
        _ways(len(batch) // schedule.microbatches),
        schedule.stages,
        -1,
        schedule.groups,
        *batch.shape[1:],
    )
    rows = jnp.moveaxis(shares, (1, 3), (0, 1))
    return rows.reshape(*rows.shape[:2], -1, *batch.shape[1:])


def _batch(schedule: Schedule, rows: jax.Array) -> jax.Array:
    """The inverse of `_microbatches`."""
    shares = rows.reshape(*rows.shape[:2], _ways(rows.shape[2]), -1, *rows.shape[3:])
    return jnp.moveaxis(shares, (0, 1), (1, 3)).reshape(-1, *rows.shape[3:])


def _ways(rows: int) -> int:
    """Ways in which the mesh, but for its stages, divides so many rows."""
    sizes, axes = free_axes(), tuple(axis for axis in BATCH_AXES if axis != STAGE)
    return math.prod(sizes[axis] for axis in dividing(rows, axes))


def _by_stage(schedule: Schedule, chunks: Sequence[range], leaf: jax.Array) -> jax.Array:
    """[P, V, K, ...] of layers [L, ...]; a chunk with fewer than K ends with some other layer."""
    size = max(map(len, chunks))
    if schedule.chunks * size > len(leaf):
        places = np.array([[chunk.start + k for k in range(size)] for chunk in chunks])
        leaf = leaf[np.minimum(places, len(leaf) - 1).reshape(-1)]
    elif schedule.virtual > 1:
        return _exchanged(schedule, leaf.reshape(schedule.chunks, size, *leaf.shape[1:]))
    passes = leaf.reshape(schedule.virtual, schedule.stages, size, *leaf.shape[1:])
    return jnp.swapaxes(passes, 0, 1)


def _exchanged(schedule: Schedule, chunks: jax.Array) -> jax.Array:
    """[P, V, ...] of chunks [C, ...] that lie on the stages in order: each goes where it runs."""
    stages, passes = schedule.stages, schedule.virtual

    def turn(mine: jax.Array, number: int) -> jax.Array:
        found, stage = jnp.zeros_like(mine[0]), jax.lax.axis_index(STAGE)
        for place in range(passes):
            homes = range(place, schedule.chunks, passes)
            pairs = [(c // passes, c % stages) for c in homes if c // stages == number]
            away = [(source, target) for source, target in pairs if source != target]
            if away:
                found += jax.lax.ppermute(mine[place], STAGE, away)
            for _, target in set(pairs) - set(away):
                found = jnp.where(stage == target, mine[place], found)
        return found

    def local(mine: jax.Array) -> jax.Array:
        return jnp.stack([turn(mine, number) for number in range(passes)])[None]

    over = {"in_specs": P(STAGE), "out_specs": P(STAGE), "axis_names": {STAGE}}
    return jax.shard_map(local, **over, check_vma=False)(chunks)


def _present(schedule: Schedule, chunks: Sequence[range]) -> jax.Array:
    """[P, V, K]: which layers of the chunks are their own."""
    size = max(map(len, chunks))
    present = np.array([[k < len(chunk) for k in range(size)] for chunk in chunks])
    return jnp.asarray(present.reshape(schedule.virtual, schedule.stages, size).swapaxes(0, 1))
