"""One sublayer of a stack: read -> branch -> write."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from depthjax.kernels.layout import gather_parameter, gather_tokens, residual_axes, spread_tokens
from depthjax.residuals import ATTENTION, KINDS, MLP, Residual, append
from depthjax.residuals.base import Phases, State

Branch = Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]]
Observer = Callable[[Residual, Any, Any, Any, Any], Any]


class LayerParams(NamedTuple):
    """What one layer reads; stacked along a leading axis [L, ...] for a scan over layers."""

    residual: dict[str, Any]
    """{"attention", "mlp"}: parameters and constants of the residual connection."""
    branch: tuple[Any, Any]
    """Parameters of the two branches."""
    meters: tuple[Any, Any] | None = None
    """A zero each, whose gradient is the sum of squares of the gradient at the branch output."""

    @classmethod
    def stacked(cls, residual: dict[str, Any], branch: tuple[Any, Any], meters: Any = None):
        """Of all layers: as `models.depth.run_depth` is given them."""
        split = None if meters is None else (meters[:, ATTENTION], meters[:, MLP])
        return cls({kind: residual[kind] for kind in KINDS}, branch, split)

    def of(self, kind: int) -> "LayerParams":
        """What the sublayer of one kind reads, with None in place of what only the other does."""

        def own(pair):
            return tuple(one if k == kind else None for k, one in enumerate(pair))

        residual = {**self.residual, KINDS[1 - kind]: None}
        return LayerParams(residual, own(self.branch), self.meters and own(self.meters))

    def stored(self, kind: int, index: jax.Array, own: Any, beyond: Any) -> tuple[Any, Any]:
        """(this gradient of all layers with `own` in it, that of one sublayer of layer `index`;
        what the backward pass goes on with). The second waits for the first, so that what a
        gradient is a product of is gone by then."""
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
        stored = jax.tree.map(put, self.of(kind), own)
        stored, beyond = jax.lax.optimization_barrier((stored, beyond))
        return combine(stored, self), beyond


@jax.custom_vjp
def tap(y: jax.Array, meter: jax.Array) -> jax.Array:
    """y itself; the cotangent of the scalar `meter` is the sum of squares of the cotangent of y."""
    return y


def _tap_forward(y, meter):
    return y, None


def _tap_backward(_, cotangent):
    wide = cotangent.astype(jnp.promote_types(cotangent.dtype, jnp.float32))
    return cotangent, jnp.sum(wide * wide).astype(jnp.float32)


tap.defvjp(_tap_forward, _tap_backward)


@dataclasses.dataclass(frozen=True)
class Sublayers:
    """The functions that a stack of layers is made of.

    rule: the residual connection. branches: (attention, MLP), each (params of one layer, x, ctx) ->
    (y, aux). observer: called before each read as observer(rule, params, carry, history, s).
    """

    rule: Residual
    branches: tuple[Branch, Branch]
    observer: Observer | None = None

    def read(self, kind: int, params: LayerParams, carry, history, s):
        return self.rule.read(_gathered(params.residual[KINDS[kind]]), carry, history, s)

    def branch(self, kind: int, params: LayerParams, x, ctx):
        y, aux = self.branches[kind](params.branch[kind], gather_tokens(x), ctx)
        y = spread_tokens(y)
        return (y if params.meters is None else tap(y, params.meters[kind])), aux

    def write(self, kind: int, params: LayerParams, carry, y, aux, s):
        own = _gathered(params.residual[KINDS[kind]])
        carry, appended = self.rule.write(own, carry, y, aux, s)
        return carry, appended if self.rule.appends(kind) else None

    def observe(self, kind: int, params: LayerParams, carry, history, s) -> Any:
        if self.observer is None:
            return None
        return self.observer(self.rule, params.residual[KINDS[kind]], carry, history, s)

    def phases(self) -> Phases | None:
        """How a forward pass may go by phases: as the rule says, unless each read is observed."""
        return self.rule.phases() if self.observer is None else None

    def sublayer(self, kind: int, params: LayerParams, state: State, s) -> tuple[State, Any]:
        """The state after sublayer s, and the aux of its branch."""
        x, ctx, carry, history = self.read(kind, params, *state, s)
        y, aux = self.branch(kind, params, x, ctx)
        return self.written(kind, params, (carry, history), y, aux, s), aux

    def written(self, kind: int, params: LayerParams, state: State, y, aux, s) -> State:
        """The state behind sublayer s, whose read left `state` and whose branch (y, aux)."""
        carry, history = state
        # What reads the history comes before the row that is put into it, or it would be copied.
        if jax.tree.leaves(history) and self.rule.appends(kind):
            y, history = jax.lax.optimization_barrier((y, history))
        carry, appended = self.write(kind, params, carry, y, aux, s)
        return carry, append(history, appended)

    def layer(self, params: LayerParams, state: State, index) -> tuple[State, Any, tuple]:
        """The state after layer `index`, what was observed of its two sublayers, [2, ...], and the
        aux of its two branches."""
        seen, left = [], []
        for kind in (ATTENTION, MLP):
            s = 2 * index + kind
            seen.append(self.observe(kind, params, *state, s))
            state, aux = self.sublayer(kind, params, state, s)
            left.append(aux)
        return state, jax.tree.map(lambda *both: jnp.stack(both), *seen), tuple(left)


def _gathered(params: Any) -> Any:
    """A residual connection's parameters of one layer, whole as its moves take them."""
    return jax.tree.map(lambda x: gather_parameter(x, residual_axes(x.shape)), params)


def differentiable(tree: Any) -> Any:
    """The tree with None in place of all that has no gradient (integers, flags, keys)."""
    return jax.tree.map(lambda x: x if _is_inexact(x) else None, tree)


def combine(some: Any, others: Any) -> Any:
    """The leaves of `some`, and those of `others` where it has None."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, some, others, is_leaf=lambda x: x is None
    )


def vjp(f: Callable, *args: Any) -> tuple[Any, Callable]:
    """`jax.vjp` in the differentiable leaves of the arguments and of the result alone: the pullback
    takes a cotangent with None in place of the others and returns a tuple of such trees. It is a
    pytree, whose leaves are what it keeps of the forward pass."""
    varied = differentiable(args)

    def narrow(varied):
        result = f(*combine(varied, args))
        return differentiable(result), result

    _, pullback, result = jax.vjp(narrow, varied, has_aux=True)
    return result, _Pullback(pullback)


@jax.tree_util.register_pytree_node_class
class _Pullback:
    def __init__(self, pullback: Callable):
        self.pullback = pullback

    def __call__(self, cotangent: Any) -> tuple:
        return self.pullback(cotangent)[0]

    def tree_flatten(self):
        return (self.pullback,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype if hasattr(x, "dtype") else jnp.result_type(x), jnp.inexact)
