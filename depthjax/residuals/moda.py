"""MoDA: attention reads over depth as well as over the sequence, on top of a plain stream."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from depthjax.residuals.base import Parameter, Residual, empty_history
from depthjax.residuals.post_ln import PostLN
from depthjax.residuals.pre_ln import PreLN

LANES = 128


@jax.custom_vjp
def tokens_minor(cache: jax.Array) -> jax.Array:
    """A cache [rows, ..., T, K, E] itself, and its cotangent, laid out with tokens innermost: a
    head's few entries would be padded there, and two layouts of one cache copied."""
    order = (*range(cache.ndim - 3), cache.ndim - 2, cache.ndim - 1, cache.ndim - 3)
    return with_layout_constraint(cache, Layout(order))


tokens_minor.defvjp(lambda cache: (tokens_minor(cache), None), lambda _, d: (tokens_minor(d),))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoDA(Residual):
    """Mixture-of-Depths Attention on a Pre-LN stream (DepthBench, appendix A).

    Each sublayer leaves a key and a value per token in a depth cache: attention its own (the key
    before rotation), the MLP a projection of its input. The attention of layer i then has, beside
    the sequence, the 2 i entries of its own token in one softmax. The last MLP has no projection,
    as nothing would read it. Init: truncated normal of 0.02. Adds (L - 1) 2 D K E parameters.
    History: 2 L - 2 rows of keys and values [..., K, E], zero until written; none for the last
    layer, whose entries nothing reads.

    The attention must play along: `read` hands it ctx = (keys [N, ..., K, E] without rotation,
    values alike, count), of which it takes the first `count` entries of a token into its softmax,
    and `write` wants aux = (key, value), both [..., K, E], the key before rotation.
    `depthjax.layers.Attention` does.
    """

    name = "moda"
    positive = ("eps", "kv_heads", "head_dim")
    eps: float = 1e-6
    """Epsilon of the norms."""
    kv_heads: int | None = None
    """Key-value heads K of the attention. None: those of the model."""
    head_dim: int | None = None
    """Size E of a head. None: that of the model."""

    @property
    def plain(self) -> PreLN:
        """The stream underneath."""
        return PreLN(eps=self.eps)

    def fill_in(self, layers, kv_shape):
        given = (self.kv_heads, self.head_dim)
        kv_heads, head_dim = kv_shape or given
        if kv_shape and any(own not in (None, of) for own, of in zip(given, kv_shape, strict=True)):
            raise ValueError(
                f"kv_heads and head_dim are {given}, but attention has {kv_shape}: leave them out"
            )
        if kv_heads is None or head_dim is None:
            raise ValueError("kv_heads and head_dim are not set: give those of the attention")
        return dataclasses.replace(self, kv_heads=kv_heads, head_dim=head_dim)

    def parameters(self, layers, width):
        declared = self.plain.parameters(layers, width)
        init = jax.nn.initializers.truncated_normal(0.02, lower=-3.0, upper=3.0)
        shape = (width, 2, self.kv_heads, self.head_dim)
        options = {"missing_last": 1, "decay": "matrix", "rounded": True}
        projection = {"kv_proj": Parameter(shape, init, **options)}
        return {**declared, "mlp": {**declared["mlp"], **projection}}

    def begin(self, embedding, layers):
        zero = jnp.zeros_like(embedding[..., :1, None])
        entry = jnp.broadcast_to(zero, (*embedding.shape[:-1], self.kv_heads, self.head_dim))
        entries = {"key": entry, "value": entry}
        rows = max(self.rows_before(2 * layers), 1)  # a single layer leaves its row empty
        cache = jax.tree.map(lambda entry: empty_history(entry, rows), entries)
        return {"stream": embedding, "entry": entries}, cache

    def read(self, params, carry, history, s):
        x, _, stream, _ = self.plain.read(params, carry["stream"], {}, s)
        if "kv_proj" not in params:  # attention
            if x.shape[-2] >= LANES:  # fewer tokens, as when decoding, would be padded themselves
                history = jax.tree.map(tokens_minor, history)
            return x, (history["key"], history["value"], s), {**carry, "stream": stream}, history
        projection = params["kv_proj"].astype(x.dtype)
        key, value = jnp.moveaxis(jnp.einsum("...d,dpke->...pke", x, projection), -3, 0)
        return x, None, {"stream": stream, "entry": {"key": key, "value": value}}, history

    def write(self, params, carry, y, aux, s):
        stream, _ = self.plain.write(params, carry["stream"], y, None, s)
        if aux is None and "kv_proj" not in params:
            raise ValueError(f"{self.name} needs what attention keeps: write with aux=(key, value)")
        entry = carry["entry"] if aux is None else dict(zip(("key", "value"), aux, strict=True))
        # Of what the MLP's read left nothing is needed any more, nor has it a cotangent.
        empty = jax.tree.map(jnp.zeros_like, entry)
        kept = s < self.rows_before(2 * self._layers)
        return {"stream": stream, "entry": empty}, (entry, s, kept)

    def finish(self, params, carry, history):
        return self.plain.finish(params, carry["stream"], {})

    def rows_before(self, s):
        return min(s, 2 * self._layers - 2)

    def stream(self, carry):
        return carry["stream"]

    def with_layer_tensor(self, carry, tensor):
        return {**carry, "stream": tensor}

    def swap(self, params, i, j):
        """The last layer has no projection, and keeps none."""
        swapped, old = super().swap(params, i, j), params["mlp"]["kv_proj"]
        last = old.shape[0] - 1
        kept = jnp.where((i == last) | (j == last), old, swapped["mlp"]["kv_proj"])
        return {**swapped, "mlp": {**swapped["mlp"], "kv_proj": kept}}

    def flops_per_token(self, layers, width):
        """4 D a depth entry read (with H E = D), and the projections."""
        projections = 4 * width * self.kv_heads * self.head_dim * (layers - 1)
        return projections + 4 * width * sum(2 * i for i in range(layers))

    def matmul_flops_per_token(self, layers, width):
        """The projections, as a scan over layers computes them: of the last layer too."""
        return 4 * width * self.kv_heads * self.head_dim * layers

    def rereading_matmul_flops_per_token(self, layers, width):
        """None: the backward pass does not need what was projected, which the cache holds."""
        return 0

    def elements_moved(self, layers, width):
        """The stream, the key and value that each sublayer leaves, and those that attention reads:
        2 i entries in layer i."""
        entry = 2 * self.kv_heads * self.head_dim
        return {"stream and depth cache": 3.0 * width + entry + entry * (layers - 1) / 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PostLNMoDA(MoDA):
    """Mixture-of-Depths Attention on a Post-LN stream (DepthBench, appendix A); else as `MoDA`."""

    name = "post_ln_moda"

    @property
    def plain(self) -> PostLN:
        return PostLN(eps=self.eps)
