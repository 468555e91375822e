"""The jitted steps: a training update with its guard, and a summed held-out loss."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from depthjax.config import Config, build_model
from depthjax.models import Transformer
from depthjax.parallel import like_parameters, over_stages, parameter_shardings, row_sharding
from depthjax.train.loss import mean_loss, summed_loss
from depthjax.train.optimizer import adamw, clip, learning_rate


class TrainState(NamedTuple):
    """All that an update reads and writes. params: nested dict of arrays."""

    params: Any
    opt: optax.OptState
    step: jax.Array
    """int32: steps taken, skipped ones included."""
    skipped: jax.Array
    """int32: updates skipped so far."""
    skipped_in_row: jax.Array
    """int32: updates skipped since the last one that was applied."""


class Program:
    """The functions of one config on one mesh, compiled at first use.

    `init() -> TrainState`, `start(params) -> TrainState` from parameters of elsewhere,
    `step(state, batch) -> (state, metrics)` which donates the state, and
    `heldout(params, input_ids [B, T], lengths [B]) -> fp32 summed loss`. `shardings` says how the
    state lies on the mesh, `by_row` how a batch does.
    """

    def __init__(self, config: Config, vocab: int, mesh: jax.sharding.Mesh):
        self.config, self.mesh = config, mesh
        self._build = functools.partial(build_model, config, vocab)
        self._graph, self._shapes = nnx.split(nnx.eval_shape(self._build), nnx.Param)
        self._optimizer = adamw(self._shapes, config)
        self._over_depth = over_stages(config.mesh, mesh.shape.get("stage", 1))
        self.replicated = NamedSharding(mesh, P())
        self.by_row, self._by_micro_row = row_sharding(mesh), row_sharding(mesh, lead=1)
        self.shardings = self._state_shardings()
        self.init = jax.jit(self._init, out_shardings=self.shardings)
        self.start = jax.jit(self._start, out_shardings=self.shardings)
        step, heldout = self.on_mesh(self._step), self.on_mesh(self._heldout)
        new = self.shardings, self.replicated
        self.step = jax.jit(step, donate_argnums=0, out_shardings=new)
        self.heldout = jax.jit(heldout, out_shardings=self.replicated)

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, without computing it."""
        return jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            jax.eval_shape(self._init),
            self.shardings,
        )

    def _state_shardings(self) -> TrainState:
        """The optimizer's moments lie as their parameters do, and the counters are whole."""
        params = parameter_shardings(self._shapes, self.mesh)
        opt = jax.eval_shape(self._init).opt
        counters = [self.replicated] * (len(TrainState._fields) - 2)
        return TrainState(params, like_parameters(params, opt, self.mesh), *counters)

    def lower(self) -> jax.stages.Lowered:
        """`step` for the batches of the config, traced but not compiled: on any mesh, also one of
        devices that are described and not there."""
        train, context = self.config.train, self.config.model.context
        batch = jax.ShapeDtypeStruct((train.batch, context), jnp.int32, sharding=self.by_row)
        return self.step.lower(self.abstract_state(), batch)

    def model(self, params: Any) -> Transformer:
        """The model that holds `params`, a nested dict of arrays."""
        state = jax.tree.map(lambda leaf: leaf, self._shapes)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(self._graph, state)

    def put(self, rows: Any) -> jax.Array:
        """This process's rows [B / P, ...] of a global batch, as the global array [B, ...]."""
        return jax.make_array_from_process_local_data(self.by_row, rows)

    def on_mesh(self, function: Callable) -> Callable:
        """`function`, traced where layers and losses find the mesh."""

        @functools.wraps(function)
        def traced(*arguments):
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return function(*arguments)

        return traced

    def _init(self) -> TrainState:
        return self._start(nnx.to_pure_dict(nnx.state(self._build(), nnx.Param)))

    def _start(self, params: Any) -> TrainState:
        zero = jnp.zeros((), jnp.int32)
        return TrainState(params, self._optimizer.init(params), zero, zero, zero)

    def _loss(self, params: Any, meters: jax.Array | None, input_ids: jax.Array):
        """Mean loss over all B (T - 1) predictions, and the RMS of the residual state by depth."""
        model = self.model(params)
        observer = None if meters is None else _mean_square
        options = {"meters": meters, "observer": observer, "over_depth": self._over_depth}
        loss, seen = mean_loss(model, input_ids, **options)
        if seen is None:
            return loss, None
        sublayers, last = seen
        return loss, jnp.append(sublayers[::2], last)

    def _gradients(self, params: Any, batch: jax.Array):
        """((loss, squares by depth), (gradient, meter readings)), averaged over micro-batches.

        Meter readings are sums of squares of per-prediction gradients of each micro-batch's mean.
        """
        pieces = self.config.train.accumulate
        meters = jnp.zeros((self.config.shape.layers, 2)) if self.config.run.depth_sizes else None
        compute = jax.value_and_grad(self._loss, argnums=(0, 1), has_aux=True)
        if pieces == 1:
            return compute(params, meters, batch)
        micro = batch.reshape(pieces, -1, batch.shape[-1])
        micro = jax.lax.with_sharding_constraint(micro, self._by_micro_row)
        wide = jax.eval_shape(compute, params, meters, micro[0])
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), wide)

        def add(total, ids):
            return jax.tree.map(jnp.add, total, compute(params, meters, ids)), None

        total, _ = jax.lax.scan(add, zeros, micro)
        return jax.tree.map(lambda t, like: (t / pieces).astype(like.dtype), total, wide)

    def _step(self, state: TrainState, batch: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update from input_ids int32 [B, T], skipped if its gradient cannot be trusted."""
        train = self.config.train
        (loss, squares), (gradient, readings) = self._gradients(state.params, batch)
        gradient = jax.lax.with_sharding_constraint(gradient, self.shardings.params)
        gradient, norm = clip(gradient, train.clip_norm)
        rate = learning_rate(state.step + 1, train, self.config.peak_lr, self.config.warmup_steps)
        trusted = jnp.isfinite(loss) & (norm <= train.guard_norm)  # a NaN norm is not <= either

        updates, opt = self._optimizer.update(gradient, state.opt, state.params, trusted=trusted)
        updates = jax.tree.map(lambda u: (-rate * u).astype(u.dtype), updates)
        params = optax.apply_updates(state.params, updates)
        params = jax.tree.map(lambda new, old: jnp.where(trusted, new, old), params, state.params)
        skipped = jnp.where(trusted, 0, 1)
        in_row = (state.skipped_in_row + 1) * skipped
        new_state = TrainState(params, opt, state.step + 1, state.skipped + skipped, in_row)
        metrics = {"loss": loss, "grad_norm": norm, "learning_rate": rate}
        metrics |= {"skipped": new_state.skipped, "skipped_in_row": in_row}
        if squares is not None:
            size = batch.size // train.accumulate * self.config.shape.width
            metrics["stream_rms"] = jnp.sqrt(squares)
            metrics["gradient_rms"] = jnp.sqrt(readings / size).reshape(-1)
        return new_state, metrics

    def _heldout(self, params: Any, input_ids: jax.Array, lengths: jax.Array) -> jax.Array:
        return summed_loss(self.model(params), input_ids, lengths, over_depth=self._over_depth)


def _mean_square(rule, params, carry, history, s) -> jax.Array:
    """Observer: mean square of the residual state in front of a read."""
    stream = rule.stream(carry).astype(jnp.float32)
    return jnp.mean(stream * stream)
