"""What all diagnostics are made of: sums over micro-batches, which can stop and go on."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from depthjax.errors import InputError
from depthjax.kernels.over_mesh import BATCH_AXES
from depthjax.models import Transformer

MICRO_BATCH = 4
"""Windows that a device takes at a time (DepthBench, section 7)."""

Sums = dict[str, np.ndarray]
Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Fold:
    """A diagnostic: float64 sums on the host, which grow step by step, and what they say."""

    sums: Sums
    """Where it starts."""
    steps: int
    step: Callable[[int, Sums], None]
    """(number of the step, sums): adds to the sums in place. The steps come in order."""
    result: Callable[[Sums], Sums]

    def run(self, progress: Progress = lambda done, steps: None) -> Sums:
        """The result after all steps; progress is told (steps done, steps) after each."""
        sums = {name: array.copy() for name, array in self.sums.items()}
        for k in range(self.steps):
            self.step(k, sums)
            progress(k + 1, self.steps)
        return self.result(sums)


def zeros(**shapes: tuple[int, ...]) -> Sums:
    """float64 zeros by name."""
    return {name: np.zeros(shape, np.float64) for name, shape in shapes.items()}


class Batches:
    """Windows of a model's input in micro-batches of one shape, and functions called on them.

    input_ids: int [W, T], T >= 2, ids of the model's vocabulary; the last micro-batch is filled up.
    micro_batch: windows a device. Under a mesh (`jax.set_mesh`, else that over which the parameters
    are laid) the rows of a micro-batch are divided over its axes "data" and "fsdp". Raises
    InputError for other input.
    """

    def __init__(self, model: Transformer, input_ids: Any, micro_batch: int = MICRO_BATCH):
        self.ids = _checked(input_ids, model.vocab)
        if micro_batch < 1:
            raise InputError(f"micro_batch is {micro_batch}: give at least 1")
        self.rule, self.shape, self.vocab = model.residual.rule, model.shape, model.vocab
        self.mesh = _mesh_of(model)
        self._graph, params = nnx.split(model)
        self._params, shards = params, 1
        if self.mesh is not None:
            shards = int(np.prod([self.mesh.shape.get(axis, 1) for axis in BATCH_AXES]))
            self._params = jax.tree.map(self._on_mesh, params)
        self.rows = min(micro_batch, -(-self.windows // shards)) * shards

    @property
    def windows(self) -> int:
        return self.ids.shape[0]

    @property
    def length(self) -> int:
        """Tokens of a window."""
        return self.ids.shape[1]

    @property
    def tokens(self) -> int:
        return self.ids.size

    @property
    def predictions(self) -> int:
        """Tokens that are predicted: all but the first of each window."""
        return self.windows * (self.length - 1)

    def __len__(self) -> int:
        return -(-self.windows // self.rows)

    def real(self, k: int) -> slice:
        """The windows in micro-batch k, which stand in its first rows."""
        return slice(k * self.rows, min((k + 1) * self.rows, self.windows))

    def call(self, function: Callable, k: int, *extra: Any) -> Any:
        """NumPy arrays: `on_devices`, fetched."""
        return jax.device_get(self.on_devices(function, k, *extra))

    def on_devices(self, function: Callable, k: int, *extra: Any) -> Any:
        """function(model, ids [b, T], real bool [b], *extra) of micro-batch k.

        function: made by `on_rows`; rows for which `real` is false must not count.
        """
        taken = self.ids[self.real(k)]
        ids = np.concatenate([taken, np.broadcast_to(taken[:1], (self.rows, self.length))])
        ids, real = ids[: self.rows], np.arange(self.rows) < len(taken)
        if self.mesh is None:
            return function(self._graph, self._params, ids, real, *extra)
        axes = tuple(axis for axis in BATCH_AXES if axis in self.mesh.shape)
        rows = NamedSharding(self.mesh, P(axes or None))

        def put(array):
            return jax.make_array_from_callback(array.shape, rows, lambda index: array[index])

        with jax.set_mesh(self.mesh):
            return function(self._graph, self._params, put(ids), put(real), *extra)

    def _on_mesh(self, leaf: jax.Array) -> jax.Array:
        if set(leaf.sharding.device_set) == set(self.mesh.devices.flat):
            return leaf
        return jax.device_put(leaf, NamedSharding(self.mesh, P()))


def boundary_means(batches: Batches, names: Sequence[str], function: Callable, count: int) -> Fold:
    """{name: [L + 1]}: function, made by `on_rows`, gives sums [L + 1, names] of a micro-batch, by
    boundary of layers; the results are these over `count`."""

    def step(k, sums):
        sums["measures"] += batches.call(function, k)

    def result(sums):
        return dict(zip(names, sums["measures"].T / count, strict=True))

    shape = batches.shape.layers + 1, len(names)
    return Fold(zeros(measures=shape), len(batches), step, result)


def on_rows(function: Callable) -> Callable:
    """function(model, ids, real, *extra), jitted, for `Batches.call`: compiled once a model and
    shape. Integers in `extra` are traced."""

    def run(graph, params, ids, real, *extra):
        return function(nnx.merge(graph, params), ids, real, *extra)

    return jax.jit(run, static_argnums=0)


def _mesh_of(model: Transformer) -> jax.sharding.Mesh | None:
    """The mesh in force, else the one that the parameters are laid over; None for one device."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        shardings = [leaf.sharding for leaf in jax.tree.leaves(nnx.state(model))]
        meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
        mesh = meshes[0] if meshes else None
    return mesh if mesh is not None and mesh.size > 1 else None


def _checked(input_ids: Any, vocab: int) -> np.ndarray:
    ids = np.asarray(input_ids)
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
        raise InputError(
            f"input_ids is {ids.dtype} of shape {ids.shape}: give integers [windows, tokens]"
        )
    if ids.shape[0] < 1 or ids.shape[1] < 2:
        raise InputError(f"input_ids has shape {ids.shape}: give at least 1 window of 2 tokens")
    if ids.min() < 0 or ids.max() >= vocab:
        raise InputError(
            f"input_ids holds {ids.min()} to {ids.max()}, but the model knows ids 0 to {vocab - 1}"
        )
    return ids.astype(np.int32)
