"""The decoder-only LLaMA backbone of DepthBench, under any residual connection."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from depthjax.kernels.layout import gather_parameter, gather_tokens, look_up, spread_tokens
from depthjax.layers import Attention, Cache, SwiGLU, rope, stack
from depthjax.layers.init import truncated_normal
from depthjax.models.depth import run_depth
from depthjax.models.keep import KEEP_ALL, Remat
from depthjax.models.shapes import Shape
from depthjax.models.sublayers import Observer, Sublayers
from depthjax.residuals import ATTENTION, Residual, ResidualModule, swap_rows


class Transformer(nnx.Module):
    """Embedding, L layers of causal attention and SwiGLU, untied head; no biases, no dropout.

    Every matrix is drawn from a truncated normal (`init_std`, cut at 3 standard deviations) without
    depth scaling; norms and mixers belong to the residual connection, which brings its own init.
    Parameters are kept in `param_dtype` and cast to `dtype` for the products; logits are fp32.
    DepthBench, section 2. Raises ValueError where `residual` does not fit the
    depth.

    unroll: a Python loop over the layers instead of a scan (slow to compile; for debugging).
    remat: what the backward pass computes again instead of keeping it, see `models.Remat`.
    """

    def __init__(
        self,
        shape: Shape,
        vocab: int,
        residual: Residual,
        *,
        rope_theta: float = 10_000.0,
        init_std: float = 0.02,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        unroll: bool = False,
        remat: Remat = KEEP_ALL,
        rngs: nnx.Rngs,
    ):
        self.shape, self.vocab, self.dtype = shape, vocab, dtype
        self.unroll, self.remat = unroll, remat
        init = truncated_normal(init_std)
        options = {"init_std": init_std, "param_dtype": param_dtype}

        def attention(rngs: nnx.Rngs) -> Attention:
            sizes = (shape.width, shape.heads, shape.kv_heads, shape.head_dim)
            return Attention(*sizes, rope_theta=rope_theta, rngs=rngs, **options)

        def mlp(rngs: nnx.Rngs) -> SwiGLU:
            return SwiGLU(shape.width, shape.mlp_width, rngs=rngs, **options)

        def matrix(**axes: int) -> nnx.Param:
            value = init(rngs.params(), tuple(axes.values()), param_dtype)
            return nnx.Param(value, decay="matrix", axes=tuple(axes))

        self.embedding = matrix(vocab=vocab, width=shape.width)
        self.attention = stack(attention, shape.layers, rngs)
        self.mlp = stack(mlp, shape.layers, rngs)
        self.head = matrix(width=shape.width, vocab=vocab)
        # Last, so that one seed draws the same backbone whatever the residual connection.
        rule = residual.bind(shape.layers, (shape.kv_heads, shape.head_dim))
        self.residual = ResidualModule(
            rule,
            layers=shape.layers,
            width=shape.width,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        for path, scale in rule.init_scales(shape.layers, shape.width).items():
            branch, name = path.split("/")
            matrix = getattr(getattr(self, branch), name)
            matrix[...] = (matrix[...] * scale).astype(param_dtype)

    def __call__(self, input_ids: jax.Array, **options) -> jax.Array:
        """Logits fp32 [B, T, V] of input_ids int32 [B, T]; options as in `features`."""
        return self.logits(self.features(input_ids, **options)[0])

    def features(
        self,
        input_ids: jax.Array,
        *,
        skip: jax.Array | int | None = None,
        swap: tuple[jax.Array | int, jax.Array | int] | None = None,
        meters: jax.Array | None = None,
        observer: Observer | None = None,
        over_depth: Callable = run_depth,
    ) -> tuple[jax.Array, Any]:
        """What the head reads [B, T, D], and what `observer` saw: (of the 2L sublayers, stacked to
        [2L, ...]; of the final read).

        skip: leave out one layer. swap: exchange two layers (their branches and, by the rules of
        the residual connection, its parameters). Indices may be traced. meters, observer: see
        `models.depth.run_depth`; the observer also sees the final read, as s = None. over_depth:
        what goes through the layers in its place, and takes and returns the same.
        """
        sublayers, params, branch_params = self.parts(observer)
        if swap is not None:
            params = sublayers.rule.swap(params, *swap)
            branch_params = tuple(swap_rows(p, *swap) for p in branch_params)
        features, seen, _ = over_depth(
            sublayers,
            params,
            branch_params,
            self.embedded(input_ids),
            layers=self.shape.layers,
            remat=self.remat,
            unroll=self.unroll,
            skip=skip,
            meters=meters,
        )
        return features, seen

    def parts(
        self, observer: Observer | None = None
    ) -> tuple[Sublayers, dict[str, Any], tuple[Any, Any]]:
        """What a loop over depth is made of: (the functions, the parameters of the residual
        connection as `layered` gives them, those of the two branches [L, ...])."""
        graphs, branch_params = zip(nnx.split(self.attention), nnx.split(self.mlp), strict=True)

        def branch(graph):
            return lambda state, x, ctx: _module(graph, state, x)(x, ctx)

        branches = (branch(graphs[0]), branch(graphs[1]))
        rule = self.residual.rule
        return Sublayers(rule, branches, observer), self.residual.layered(), branch_params

    def advance(
        self, input_ids: jax.Array, past: Cache | None = None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """(features [B, T, D], (keys, values) [L, B, T, K, E]) of tokens [B, T] that follow those
        in `past` (of all layers; None: there are none). The keys are rotated, as a cache has them.

        Nothing else is kept of a token: its depth state lives and dies with it.
        """
        (attention, of_attention), (mlp, of_mlp) = nnx.split(self.attention), nnx.split(self.mlp)

        def attend(inputs, x, ctx):
            state, before = inputs
            before = before and past._replace(key=before[0], value=before[1])
            return _module(attention, state, x)(x, ctx, before)

        branches = attend, lambda state, x, ctx: _module(mlp, state, x)(x, ctx)
        features, _, left = run_depth(
            Sublayers(self.residual.rule, branches),
            self.residual.layered(),
            ((of_attention, past and (past.key, past.value)), of_mlp),
            self.embedded(input_ids),
            layers=self.shape.layers,
            unroll=self.unroll,
            auxiliary=True,
        )
        keys, values = left[ATTENTION]
        start = None if past is None else past.length
        rotate = functools.partial(rope, theta=self.attention.rope_theta, start=start)
        return features, (jax.vmap(rotate)(keys), values)

    def embedded(self, input_ids: jax.Array) -> jax.Array:
        """[B, T, D] of input_ids int32 [B, T]: what depth begins with."""
        return spread_tokens(look_up(self.embedding[...].astype(self.dtype), input_ids))

    def logits(self, features: jax.Array) -> jax.Array:
        """fp32 [B, T, V] from features [B, T, D]."""
        matrix = gather_parameter(self.head[...], self.head.axes, self.dtype)
        logits = gather_tokens(features) @ matrix
        return logits.astype(jnp.promote_types(self.dtype, jnp.float32))


def _module(graph: nnx.GraphDef, state: nnx.State, x: jax.Array) -> nnx.Module:
    """The branch of one layer, its matrices as the products with x take them."""

    def gather(matrix: nnx.Param) -> nnx.Param:
        return matrix.replace(gather_parameter(matrix[...], matrix.axes, x.dtype))

    return nnx.merge(graph, jax.tree.map(gather, state, is_leaf=lambda v: isinstance(v, nnx.Param)))
