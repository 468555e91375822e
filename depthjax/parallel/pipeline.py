"""Depth over the stages of a pipeline: the same moves as `models.depth`, chunk by chunk.

The payload of a hand-off is the carry and the rows of the history that the receiving stage lacks
(see `parallel.schedule`), so no variant is named here. Going forward, a stage keeps of a microbatch
the carry in front of each of its chunks, and one history for all of them, without the rows behind
the last chunk's front; going backward, it computes a chunk again from these. The cotangents of rows
that it holds add up on the stage, and go back once, by the way that the rows came.

Both directions are a `shard_map` over the mesh axis `stage`; the other axes stay automatic. Outside
of it `stage` divides a batch as `data` does: each stage embeds its share of every P microbatches
and sends it to the first stage, and gets the features of that share back from the last, so that
the work of embedding and head is divided over the stages, and none of it done twice. The final read
runs on all stages at once, as they keep step; only what the last one reads counts.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from depthjax.kernels.layout import state_specs
from depthjax.kernels.over_mesh import STAGE, free_axes
from depthjax.models.keep import Remat
from depthjax.models.sublayers import LayerParams, Sublayers, differentiable, vjp
from depthjax.models.vjp import scan_layers
from depthjax.parallel.handoff import Exchange
from depthjax.residuals.base import State


class _Plan(NamedTuple):
    """What a stage does in a tick; [ticks, P], or [ticks] where it is the same for all stages."""

    active: Any
    """Whether it has an item at all."""
    turn: Any
    first: Any
    """Layers in front of its chunk."""
    held: Any
    """Rows that it held before."""
    microbatch: Any
    next_microbatch: Any
    slot: Any
    """Of its microbatch within the group."""
    previous_slot: Any
    begun: Any
    """Group of the microbatch that the first stage begins, or -1."""
    finished: Any
    """Group of the microbatch that the last stage finishes, or -1."""

    def here(self) -> "_Plan":
        """Of one tick, on this stage."""
        stage = jax.lax.axis_index(STAGE)
        return jax.tree.map(lambda x: x[stage] if x.ndim else x, self)


class _Cotangents(NamedTuple):
    """What the backward pass returns."""

    params: Any
    final: Any
    embeddings: jax.Array


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The depth of a network over stages.

    begin: from an embedding [B, T, D] to the state. like: the embedding of one microbatch. first:
    layers in front of each chunk [C].
    """

    exchange: Exchange
    sublayers: Sublayers
    remat: Remat
    begin: Callable[[jax.Array], State]
    like: jax.ShapeDtypeStruct
    first: tuple[int, ...]

    def run(self, params: LayerParams, final: Any, embeddings: jax.Array) -> jax.Array:
        """Features [P, M / P, B, T, D] of embeddings [P, M / P, B, T, D], where [i, g] holds
        microbatch g P + i. params: [P, V, K, ...], by stage, pass, and layer of the chunk; final:
        of the final read. Differentiable in reverse mode."""
        forward, backward = self._over_stages(self._forward), self._over_stages(self._backward)

        @jax.custom_vjp
        def run(params, final, embeddings):
            return forward(params, final, embeddings)[0]

        def run_forward(params, final, embeddings):
            features, *kept = forward(params, final, embeddings)
            return features, (params, final, embeddings, *kept)

        def run_backward(kept, d_features):
            d_params, d_final, d_embeddings = backward(*kept, d_features)
            return d_params, jax.tree.map(lambda x: x.sum(0), d_final), d_embeddings

        run.defvjp(run_forward, run_backward)
        return run(params, final, embeddings)

    def _over_stages(self, program: Callable) -> Callable:
        """`program` on each stage. What it takes and returns is divided along a first axis that it
        does not see itself; its second argument each stage sees whole."""

        def local(params, final, *rest):
            params, rest = jax.tree.map(lambda x: x[0], (params, rest))
            return jax.tree.map(lambda x: x[None], tuple(program(params, final, *rest)))

        def over(params, final, *rest):
            specs = P(STAGE), P(), *[P(STAGE)] * len(rest)
            run = jax.shard_map(
                local, in_specs=specs, out_specs=P(STAGE), axis_names={STAGE}, check_vma=False
            )
            return run(params, final, *rest)

        return over

    def _plan(self) -> _Plan:
        table, schedule = self.exchange.table, self.exchange.schedule
        ticks, size = range(schedule.ticks), schedule.stages

        def group(microbatch: int | None) -> int:
            return -1 if microbatch is None else microbatch // size

        microbatch, slot = table(lambda m, c: m), table(lambda m, c: m % size)
        return _Plan(
            active=table(lambda m, c: True),
            turn=table(lambda m, c: c // size),
            first=table(lambda m, c: self.first[c]),
            held=table(lambda m, c: self.exchange.rows.held(c)),
            microbatch=microbatch,
            next_microbatch=np.roll(microbatch, -1, axis=0),
            slot=slot,
            previous_slot=np.roll(slot, 1, axis=0),
            begun=np.array([group(schedule.taken_up(tick)) for tick in ticks]),
            finished=np.array([group(schedule.finished(tick)) for tick in ticks]),
        )

    def _blank(self) -> State:
        """Zeros like the state of one microbatch."""
        return _zeros(jax.eval_shape(self.begin, self.like))

    def _spread(self, state: State) -> State:
        """The state, divided over the other axes of the mesh."""
        if math.prod(free_axes().values()) == 1:
            return state
        specs = state_specs(self.begin, self.like)
        return jax.tree.map(jax.lax.with_sharding_constraint, state, specs)

    def _chunk(self, here: _Plan, own: LayerParams, state: State) -> State:
        state = self._spread(state)
        return scan_layers(self.sublayers, own, state, here.first, self.remat)[0]

    def _forward(self, params, final, embeddings):
        """(features [M / P, ...], the kept rows of each microbatch, the carry of each tick)."""
        schedule, rule, kept = self.exchange.schedule, self.sublayers.rule, self.exchange.rows.kept
        ticks, nothing = range(-1, schedule.ticks), jnp.zeros_like(embeddings[0])
        ready, *between = [self._between(tick, embeddings) for tick in ticks]

        def step(loop, inputs):
            tick, plan = inputs
            (carry, history), histories, features = loop
            here = plan.here()
            after = self._chunk(here, _at(params, here.turn), (carry, history))
            read = jax.lax.cond(
                here.finished >= 0, lambda: rule.finish(final, *after), lambda: nothing
            )
            left = _first(_where(here.active, after[1], history), kept)
            histories = _set(histories, left, here.microbatch)
            following = _at(histories, here.next_microbatch)
            state, share = jax.lax.switch(tick, between, after, following, read)
            return (state, histories, _add(features, share, here.finished)), carry

        carry, history = self._blank()
        following = _first(history, kept)
        state, _ = ready((carry, history), following, nothing)
        loop = state, _copies(following, schedule.microbatches), jnp.zeros_like(embeddings)
        inputs = jnp.arange(schedule.ticks), self._plan()
        (_, histories, features), carries = jax.lax.scan(step, loop, inputs)
        return features, histories, carries

    def _between(self, tick: int, embeddings: jax.Array) -> Callable:
        """What happens after a tick, or for -1 in front of the first: from the state behind the
        chunks, the kept rows of the next microbatch, and the final read, to the state in front of
        the next chunks, and the features of a microbatch that is finished, where they go."""
        exchange, schedule = self.exchange, self.exchange.schedule
        begun, finished = schedule.taken_up(tick + 1), schedule.finished(tick)

        def between(after, following, read):
            carry, following = exchange.send(tick, *after, _filled_up(following, after[1]))
            if begun is not None:
                x = exchange.to_first(embeddings[begun // schedule.stages], begun)
                is_first = jax.lax.axis_index(STAGE) == 0
                carry = _where(is_first, self.begin(x)[0], carry)
            share = jnp.zeros_like(read)
            if finished is not None:
                share = exchange.from_last(read, finished)
            return (carry, following), share

        return between

    def _backward(self, params, final, embeddings, histories, carries, d_features):
        """Cotangents of params, of final (of each stage its part), and of the embeddings."""
        schedule, rule = self.exchange.schedule, self.sublayers.rule
        ticks, pending = range(-1, schedule.ticks), self.exchange.rows.pending
        *between, ready = [self._between_back(tick, embeddings, d_features) for tick in ticks]

        def step(loop, inputs):
            tick, plan, carry = inputs
            d_after, d_read, d_histories, d = loop
            here = plan.here()
            own, history = _at(params, here.turn), _at(histories, here.microbatch)
            history = _filled_up(history, d_after[1])
            after, pull = vjp(
                lambda own, state: self._chunk(here, own, state), own, (carry, history)
            )

            def last(d_after):
                d_last, *d_more = vjp(rule.finish, final, *after)[1](d_read)
                return d_last, _plus(d_after, tuple(d_more))

            def not_last(d_after):
                return _zeros(differentiable(final)), d_after

            waiting = _first(d_after[1], pending)
            d_last, d_after = jax.lax.cond(here.finished >= 0, last, not_last, d_after)
            d_own, (d_carry, d_history) = pull(d_after)
            d_own = _where(here.active, d_own, _zeros(d_own))
            left = _live(_first(d_history, pending), here.held)
            left = _where(here.active, left, waiting)
            d_histories = _set(d_histories, left, here.slot)
            before = _at(d_histories, here.previous_slot)
            d_after, d_read, share = jax.lax.switch(tick, between, (d_carry, d_history), before)
            d = _Cotangents(
                _add(d.params, d_own, here.turn),
                _plus(d.final, d_last),
                _add(d.embeddings, share, here.begun),
            )
            return (d_after, d_read, d_histories, d), None

        d_state = differentiable(self._blank())
        waiting = _first(d_state[1], pending)
        d_after, d_read, _ = ready(d_state, waiting)
        d_histories = _copies(waiting, schedule.stages)
        loop = (
            d_after,
            d_read,
            d_histories,
            _zeros(differentiable(_Cotangents(params, final, embeddings))),
        )
        inputs = jnp.arange(schedule.ticks), self._plan(), carries
        (*_, d), _ = jax.lax.scan(step, loop, inputs, reverse=True)
        return d

    def _between_back(self, tick: int, embeddings: jax.Array, d_features: jax.Array) -> Callable:
        """The transpose of `_between`: from the cotangents of the state in front of the next
        chunks, and of the rows that wait for them, to those of the state behind the chunks, of the
        final read, and of the embedding that the next tick begins, where it lies."""
        exchange, schedule = self.exchange, self.exchange.schedule
        begun, finished = schedule.taken_up(tick + 1), schedule.finished(tick)

        def between(d_next, before):
            share = d_read = jnp.zeros_like(embeddings[0])
            if begun is not None:
                x = exchange.to_first(embeddings[begun // schedule.stages], begun)
                share = exchange.from_first(
                    vjp(lambda x: self.begin(x)[0], x)[1](d_next[0])[0], begun
                )
            if finished is not None:
                d_read = exchange.to_last(d_features[finished // schedule.stages], finished)
            return exchange.send_back(tick, *d_next, _filled_up(before, d_next[1])), d_read, share

        return between


def _first(history: Any, rows: int) -> Any:
    return jax.tree.map(lambda x: x[:rows], history)


def _filled_up(rows: Any, history: Any) -> Any:
    """The first rows of a history, with zeros behind them as many rows as that has."""

    def fill(x, like):
        return jnp.pad(x, [(0, len(like) - len(x)), *[(0, 0)] * (x.ndim - 1)])

    return jax.tree.map(fill, rows, history)


def _live(history: Any, count: jax.Array) -> Any:
    """A history with zeros for all but its first rows."""

    def keep(buffer):
        row = jnp.arange(buffer.shape[0]).reshape(-1, *[1] * (buffer.ndim - 1))
        return jnp.where(row < count, buffer, 0)

    return jax.tree.map(keep, history)


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


def _copies(tree: Any, number: int) -> Any:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (number, *x.shape)), tree)


def _where(flag: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(flag, a, b), new, old)


def _plus(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


def _at(tree: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), tree)


def _set(tree: Any, one: Any, index: jax.Array) -> Any:
    put = jax.lax.dynamic_update_index_in_dim
    return jax.tree.map(lambda x, new: put(x, new, index, 0), tree, one)


def _add(tree: Any, one: Any, index: jax.Array) -> Any:
    return _set(tree, _plus(_at(tree, index), one), index)
