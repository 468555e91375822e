"""A residual connection for a Python loop over depth: as pure functions, and as an NNX module."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from depthjax.residuals.base import KINDS, Parameter, Residual, State, append

Params = Mapping[str, Mapping[str, jax.Array]]


def init_params(
    rule: Residual, key: jax.Array, *, layers: int, width: int, param_dtype: Any = jnp.float32
) -> dict[str, dict[str, jax.Array]]:
    """The initial parameters of a variant bound to `layers`: {"attention": {name: [rows, ...]},
    "mlp": ..., "final": {name: [...]}}, a row for each layer that has the parameter.

    param_dtype: of those that the variant does not keep in fp32.
    """

    def make(parameter: Parameter, rows: tuple[int, ...], key: jax.Array) -> jax.Array:
        dtype = jnp.float32 if parameter.float32 else param_dtype
        return parameter.init(key, (*rows, *parameter.shape), dtype)

    declared = rule.parameters(layers, width)
    rows = {
        (kind, name): () if kind == "final" else (layers - p.first_layer - p.missing_last,)
        for kind in (*KINDS, "final")
        for name, p in declared[kind].items()
    }
    params: dict[str, dict[str, jax.Array]] = {kind: {} for kind in (*KINDS, "final")}
    for (kind, name), own_key in zip(rows, jax.random.split(key, len(rows)), strict=True):
        params[kind][name] = make(declared[kind][name], rows[kind, name], own_key)
    return params


def layered(
    rule: Residual, params: Params, *, layers: int, width: int, dtype: Any = None
) -> dict[str, Any]:
    """Parameters and constants of all layers, those of a kind all [L, ...], as a scan over depth
    wants them: rows that a layer lacks are zeros here, exist nowhere else, and get no gradient.

    dtype: of the activations, which parameters that say so are rounded to (None: none are).
    """
    declared = rule.parameters(layers, width)

    def pad(value: jax.Array, p: Parameter) -> jax.Array:
        # Rounded first: with its gradient, what is padded is a copy of the parameter.
        value = value.astype(dtype or value.dtype) if p.rounded else value
        return jnp.pad(value, [(p.first_layer, p.missing_last)] + [(0, 0)] * (value.ndim - 1))

    tree = {k: {n: pad(v, declared[k][n]) for n, v in params[k].items()} for k in KINDS}
    for kind, constants in rule.constants(layers).items():
        tree[kind] |= {name: jnp.asarray(value) for name, value in constants.items()}
    return {**tree, "final": dict(params["final"])}


def sublayer_params(
    rule: Residual, params: Params, s: int, *, layers: int, width: int
) -> dict[str, jax.Array]:
    """What `read` and `write` take at sublayer s; IndexError beyond the stack."""
    if not 0 <= s < 2 * layers:
        raise IndexError(f"sublayer {s} of a stack of {2 * layers} sublayers")
    layer, kind = s // 2, KINDS[s % 2]
    row = {}
    for name, p in rule.parameters(layers, width)[kind].items():
        exists = p.first_layer <= layer < layers - p.missing_last
        value = params[kind][name]
        row[name] = value[layer - p.first_layer] if exists else jnp.zeros(p.shape, value.dtype)
    constants = rule.constants(layers).get(kind, {})
    return row | {name: jnp.asarray(value[layer]) for name, value in constants.items()}


def apply_branches(
    rule: Residual,
    params: Params,
    branches: Sequence[Callable[[jax.Array], jax.Array]],
    embedding: jax.Array,
) -> jax.Array:
    """What the head reads, [..., D], after 2 L `branches` ([..., D] -> [..., D]) one by one.

    rule: bound to L layers; params: as `init_params` gives them; embedding: [..., D]. For branches
    that neither take depth context nor return any; the module below passes both.
    """
    layers, width = len(branches) // 2, embedding.shape[-1]
    _check_embedding(embedding, width)
    shapes = jax.eval_shape(
        lambda key: init_params(rule, key, layers=layers, width=width), jax.random.key(0)
    )
    if len(branches) % 2 or jax.tree.map(jnp.shape, params) != jax.tree.map(jnp.shape, shapes):
        raise ValueError(
            f"params are not those of {len(branches)} branches of width {width}, two for each layer"
        )
    carry, history = rule.begin(embedding, layers)
    for s, branch in enumerate(branches):
        row = sublayer_params(rule, params, s, layers=layers, width=width)
        x, _, carry, history = rule.read(row, carry, history, s)
        carry, appended = rule.write(row, carry, _output(branch(x), x, s), None, s)
        history = append(history, appended)
    return rule.finish(params["final"], carry, history)


def _check_embedding(embedding: jax.Array, width: int) -> None:
    if not jnp.issubdtype(embedding.dtype, jnp.floating):
        raise ValueError(f"the embedding holds {embedding.dtype}: give floats")
    if embedding.shape[-1:] != (width,):
        raise ValueError(f"the embedding is {embedding.shape}, but width is {width}: give [..., D]")


def _output(y: jax.Array, like: jax.Array, s: int) -> jax.Array:
    """What sublayer s returned, in the dtype of the state; ValueError for another shape."""
    if y.shape != like.shape:
        raise ValueError(f"sublayer {s} returned {y.shape}: give {like.shape}, as the state is")
    return y.astype(like.dtype)


class ResidualModule(nnx.Module):
    """The parameters of a variant for a whole stack, and its moves for a Python loop over depth.

        self.residual = ResidualModule(BlockAttnRes(), layers=12, width=512, rngs=rngs)
        ...
        state = self.residual.begin(x)
        for s, branch in enumerate(branches):              # 2 * layers of them
            x, _, state = self.residual.read(state, s)
            state = self.residual.write(state, branch(x), s)
        x = self.residual.finish(state)

    s is a Python int, and every sublayer is read and written once, in order. rule: the variant
    (bound to `layers` here); width: D. dtype: of the activations it returns (None: that of the
    embedding); what branches return is cast to it. param_dtype: of parameters that a variant does
    not pin to fp32. metadata: passed on to every nnx.Param, for instance an `out_sharding` on a
    mesh; or a function of a parameter's path ("attention/query") and shape (whose first axis is the
    layers', except in "final/...") that returns it.
    Raises ValueError where the rule does not fit the number of layers, or an array the width.
    """

    def __init__(
        self,
        rule: Residual,
        *,
        layers: int,
        width: int,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        metadata: Mapping[str, Any] | Callable[[str, tuple[int, ...]], Mapping] | None = None,
        rngs: nnx.Rngs,
    ):
        if isinstance(rule, type):
            raise ValueError(f"rule is the class {rule.__name__}: give an instance, with ()")
        self.rule = rule.bind(layers)
        self.layers, self.width = layers, width
        self.dtype = dtype
        declared = self.rule.parameters(layers, width)
        values = init_params(
            self.rule, rngs.params(), layers=layers, width=width, param_dtype=param_dtype
        )

        def make(kind: str, name: str, value: jax.Array) -> nnx.Param:
            extra = metadata(f"{kind}/{name}", value.shape) if callable(metadata) else metadata
            return nnx.Param(value, **{"decay": declared[kind][name].decay, **(extra or {})})

        for kind in (*KINDS, "final"):
            made = {name: make(kind, name, value) for name, value in values[kind].items()}
            setattr(self, kind, nnx.Dict(made))

    def params(self) -> dict[str, dict[str, jax.Array]]:
        """The parameters as plain arrays, as the functions above take them."""
        kinds = (*KINDS, "final")
        return {k: {name: p[...] for name, p in getattr(self, k).items()} for k in kinds}

    def layered(self) -> dict[str, Any]:
        """The same with all rows, and the constants: see the function `layered`."""
        sizes = {"layers": self.layers, "width": self.width}
        return layered(self.rule, self.params(), **sizes, dtype=self.dtype)

    def sublayer_params(self, s: int) -> dict[str, jax.Array]:
        """What the variant's own `read` and `write` take at sublayer s."""
        return sublayer_params(self.rule, self.params(), s, layers=self.layers, width=self.width)

    def begin(self, embedding: jax.Array) -> State:
        """The state before sublayer 0, from the embedding [..., D]."""
        _check_embedding(embedding, self.width)
        return self.rule.begin(embedding.astype(self.dtype or embedding.dtype), self.layers)

    def read(self, state: State, s: int) -> tuple[jax.Array, Any, State]:
        """(x, ctx, state): the input [..., D] of sublayer s, and depth context for attention."""
        x, ctx, carry, history = self.rule.read(self.sublayer_params(s), *state, s)
        return x, ctx, (carry, history)

    def write(self, state: State, y: jax.Array, s: int, aux: Any = None) -> State:
        """The state after sublayer s returned y [..., D]."""
        carry, history = state
        y = _output(y, jax.eval_shape(self.rule.stream, carry), s)
        carry, appended = self.rule.write(self.sublayer_params(s), carry, y, aux, s)
        return carry, append(history, appended)

    def finish(self, state: State) -> jax.Array:
        """The final read and norm: [..., D]."""
        return self.rule.finish(self.params()["final"], *state)
