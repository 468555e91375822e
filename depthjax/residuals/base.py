"""The residual protocol: a residual connection is a few pure moves on a depth state.

A network of L layers has 2L sublayers: s = 2l is the attention (or any mixer) of layer l and
s = 2l + 1 its MLP. Between two branches there is one place where a residual connection works:
it *writes* what came back and *reads* what goes next. Its state has two parts:

    carry    a pytree of fixed shape that changes at every sublayer (the residual stream, an open
             sum, several streams, a few counters);
    history  a pytree of append-only buffers [rows, ...]: each row is written once, and a reader
             touches only rows below its count. Variants without memory have an empty history.

A model is the same five moves for every variant (`s` may be traced, so one scan serves all depths):

    carry, history         = begin(embedding, layers)
    for s in 0 .. 2L-1:
        x, ctx, carry, history = read(params[s], carry, history, s)  # x: normalised branch input
        y, aux                 = branch[s](x, ctx)
        carry, appended        = write(params[s], carry, y, aux, s)
        history                = append(history, appended)
    out                    = finish(params["final"], carry, history) # what the LM head reads

Why the moves look as they do: `read` returns the state because what it computes for the read may
also be what the write needs; `write` never touches the history, the caller appends, so that a
backward pass can hold one buffer; `ctx` gives attention extra depth keys and values, and `aux`
gives them back. The norms of a block belong to its residual connection, since where they stand is
what tells many variants apart.

Probes use two more moves, both with traced indices: `skip` (the state as if a layer had not been
there) and `swap` (the parameters with two layers exchanged).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

ATTENTION, MLP = 0, 1
KINDS = ("attention", "mlp")  # the sublayers of one layer, in order

State = tuple[Any, Any]  # (carry, history)
Appended = tuple[Any, jax.Array | int, jax.Array | bool] | None  # (rows, slot, flag)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """What a variant says of one of its parameters.

    shape: of one row. init: an initializer (key, shape, dtype) -> array, asked for all rows at
    once. first_layer, missing_last: layers before the first and so many at the end do not have the
    parameter, and store no row for it. decay: "matrix" is always decayed, "vector" only when the
    recipe decays norms and queries too, "never". float32: stays fp32 when others are bf16.
    """

    shape: tuple[int, ...]
    init: Callable = jax.nn.initializers.ones
    first_layer: int = 0
    missing_last: int = 0
    decay: str = "vector"
    float32: bool = False


@dataclasses.dataclass(frozen=True)
class Residual:
    """Base of all variants: a frozen set of hyperparameters and the pure moves of the protocol."""

    name: ClassVar[str]

    def bind(self, layers: int, kv_shape: tuple[int, int] | None = None) -> "Residual":
        """This variant for a stack of `layers` layers whose attention, if it has any, has keys of
        `kv_shape` = (heads, size): defaults that depend on them filled in.

        Raises ValueError with one sentence where a hyperparameter does not fit.
        """
        return self

    def parameters(self, layers: int, width: int) -> Mapping[str, Mapping[str, Parameter]]:
        """Declares the parameters: {"attention": {...}, "mlp": {...}, "final": {...}}."""
        raise NotImplementedError

    def constants(self, layers: int) -> Mapping[str, Mapping[str, np.ndarray]]:
        """What `read` and `write` find beside the parameters but nothing trains: {kind: {name:
        [L, ...]}}. Swapping layers exchanges their rows too."""
        return {}

    def init_scales(self, layers: int) -> Mapping[str, float]:
        """Factors on the init of the branches' matrices, by path ("attention/out", "mlp/down")."""
        return {}

    def begin(self, embedding: jax.Array, layers: int) -> State:
        """The state before the first sublayer; embedding: [..., D]."""
        raise NotImplementedError

    def read(self, params, carry, history, s):
        """(x, ctx, carry, history): x is the normalised input [..., D] of sublayer s."""
        raise NotImplementedError

    def write(self, params, carry, y, aux, s) -> tuple[Any, Appended]:
        """(carry, appended) after sublayer s returned y [..., D]."""
        raise NotImplementedError

    def finish(self, params, carry, history) -> jax.Array:
        """What the LM head reads, [..., D]: the final read and the final norm."""
        raise NotImplementedError

    def stream(self, carry) -> jax.Array:
        """The running state [..., D] whose size by depth is logged."""
        raise NotImplementedError

    def observe(self, params, carry, history, s) -> dict[str, jax.Array]:
        """What a probe can record of the read at s (None: the final read). Empty by default."""
        return {}

    def skip(self, before: State, after: State, s) -> State:
        """The state that follows when the layer whose first sublayer is s is left out."""
        return before

    def swap(self, params, i, j):
        """The parameters, as `layered` gives them, with those of layers i and j exchanged."""
        return {**params, **{kind: swap_rows(params[kind], i, j) for kind in KINDS}}

    def flops_per_token(self, layers: int, width: int) -> int:
        """Forward FLOPs a token beyond the branches and the norms (a multiply-add counts 2)."""
        return 0


def append(history, appended: Appended):
    """Writes `appended` = (rows, slot, flag) into the history; an unset flag changes nothing."""
    if appended is None:
        return history
    rows, slot, flag = appended

    def put(buffer, row):
        old = jax.lax.dynamic_index_in_dim(buffer, slot, 0, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(buffer, jnp.where(flag, row, old), slot, 0)

    return jax.tree.map(put, history, rows)


def swap_rows(tree, i, j):
    """Exchanges rows i and j of every leaf [L, ...]; the indices may be traced."""
    return jax.tree.map(lambda leaf: leaf.at[i].set(leaf[j]).at[j].set(leaf[i]), tree)


class ResidualModule(nnx.Module):
    """The parameters of a variant for a whole stack, and its moves for a Python loop over depth.

        self.residual = ResidualModule(BlockAttnRes(), layers=12, width=512, rngs=rngs)
        ...
        state = self.residual.begin(x)
        for s, branch in enumerate(branches):              # 2 * layers of them
            x, _, state = self.residual.read(state, s)
            state = self.residual.write(state, branch(x), s)
        x = self.residual.finish(state)

    rule: the variant (bound to `layers` here); width: D. dtype: of the activations it returns
    (None: that of the embedding). param_dtype: of parameters that a variant does not pin to fp32.
    metadata: passed on to every nnx.Param, for instance an `out_sharding` on a mesh; or a function
    of a parameter's shape (whose first axis is the layers', except in "final") that returns it.
    Raises ValueError where the rule does not fit the number of layers.
    """

    def __init__(
        self,
        rule: Residual,
        *,
        layers: int,
        width: int,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        metadata: Mapping[str, Any] | Callable[[tuple[int, ...]], Mapping[str, Any]] | None = None,
        rngs: nnx.Rngs,
    ):
        self.rule = rule.bind(layers)
        self.layers, self.width = layers, width
        self.dtype = dtype

        def make(parameter: Parameter, rows: tuple[int, ...]) -> nnx.Param:
            kind = jnp.float32 if parameter.float32 else param_dtype
            shape = (*rows, *parameter.shape)
            value = parameter.init(rngs.params(), shape, kind)
            own = metadata(shape) if callable(metadata) else metadata or {}
            return nnx.Param(value, decay=parameter.decay, **own)

        declared = self.rule.parameters(layers, width)
        for kind in KINDS:
            rows = {n: layers - p.first_layer - p.missing_last for n, p in declared[kind].items()}
            made = {name: make(p, (rows[name],)) for name, p in declared[kind].items()}
            setattr(self, kind, nnx.Dict(made))
        self.final = nnx.Dict({name: make(p, ()) for name, p in declared["final"].items()})

    def layered(self) -> dict[str, dict[str, jax.Array]]:
        """The parameters and constants as plain arrays, those of a kind all [L, ...]: rows that a
        layer lacks are zeros here, exist nowhere else, and get no gradient."""
        declared = self.rule.parameters(self.layers, self.width)

        def pad(value: jax.Array, p: Parameter) -> jax.Array:
            return jnp.pad(value, [(p.first_layer, p.missing_last)] + [(0, 0)] * (value.ndim - 1))

        tree = {
            kind: {n: pad(p[...], declared[kind][n]) for n, p in getattr(self, kind).items()}
            for kind in KINDS
        }
        for kind, constants in self.rule.constants(self.layers).items():
            tree[kind] |= {name: jnp.asarray(value) for name, value in constants.items()}
        return {**tree, "final": {name: p[...] for name, p in self.final.items()}}

    def _row(self, s: int) -> dict[str, jax.Array]:
        if not 0 <= s < 2 * self.layers:
            raise IndexError(f"sublayer {s} of a stack of {2 * self.layers} sublayers")
        return {k: v[s // 2] for k, v in self.layered()[KINDS[s % 2]].items()}

    def begin(self, embedding: jax.Array) -> State:
        """The state before sublayer 0, from the embedding [..., D]."""
        return self.rule.begin(embedding.astype(self.dtype or embedding.dtype), self.layers)

    def read(self, state: State, s: int):
        """(x, ctx, state): the input [..., D] of sublayer s, and depth context for attention."""
        x, ctx, carry, history = self.rule.read(self._row(s), *state, s)
        return x, ctx, (carry, history)

    def write(self, state: State, y: jax.Array, s: int, aux=None) -> State:
        """The state after sublayer s returned y [..., D]."""
        carry, history = state
        carry, appended = self.rule.write(self._row(s), carry, y, aux, s)
        return carry, append(history, appended)

    def finish(self, state: State) -> jax.Array:
        """The final read and norm: [..., D]."""
        return self.rule.finish(self.layered()["final"], *state)
