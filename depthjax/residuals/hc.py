"""Hyper-Connections: several residual streams that each sublayer reads, mixes and writes."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from depthjax.kernels import beside, read_streams, rms_norm, stream_products
from depthjax.kernels.rms_norm import at_least_float32
from depthjax.residuals.base import ATTENTION, KINDS, MLP, Parameter, Paths, Residual, swap_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamResidual(Residual):
    """What HC and its relatives share: m streams [m, ..., D] that start as copies of the embedding.

    `read` leaves the mixed streams and the write weights in the carry, so a write is one
    multiply-add. Init of attention output and MLP down matrices: divided by sqrt(m).
    """

    positive = ("eps", "streams")
    projections: ClassVar[tuple[str, ...]] = ()
    """Names of the parameters that `columns` is made of."""
    limits: ClassVar[Mapping[str, str]] = {
        "jacobian_norms": "a layer hands on several streams, whose Jacobian is no D x D matrix",
        "token_collapse": "a layer hands on several streams, and the measure is of one",
        "newest_source_weight": Residual.limits["newest_source_weight"],
    }
    streams: int = 4
    """Residual streams m."""
    eps: float = 1e-6
    """Epsilon of the norms in front of the branches and of the final one."""

    def connection(self, kind: int, width: int) -> dict[str, Parameter]:
        """Declares the parameters of the connectors of one kind."""
        raise NotImplementedError

    def columns(self, params) -> jax.Array | None:
        """What the streams are multiplied with for their weights; see `stream_products`."""
        return None

    def gates(self, params) -> dict[str, jax.Array]:
        """The parameters that `weigh` sees: all that have no axis of features."""
        return {name: params[name] for name in params if name not in ("norm", *self.projections)}

    def weigh(self, gates, products, squares) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(read [m, ...], write [m, ...], transport [m, m, ...]) in at least fp32, from the
        products and the mean squares of the streams; row t of the transport says what new stream t
        takes from the old ones. Spelled as `read_streams` wants it."""
        raise NotImplementedError

    def weights(self, params, streams) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The same of streams [m, ..., D]."""
        gates = beside(self.gates(params), streams.ndim - 2)
        return self.weigh(gates, *stream_products(streams, self.columns(params)))

    def collapse(self, streams) -> jax.Array:
        """What the final norm sees, [..., D]."""
        return jnp.sum(at_least_float32(streams), axis=0).astype(streams.dtype)

    def parameters(self, layers, width):
        norm = {"norm": Parameter((width,))}
        attention = {**norm, **self.connection(ATTENTION, width)}
        return {
            "attention": attention,
            "mlp": {**norm, **self.connection(MLP, width)},
            "final": norm,
        }

    def init_scales(self, layers, width):
        return dict.fromkeys(("attention/out", "mlp/down"), self.streams**-0.5)

    def begin(self, embedding, layers):
        copies = jnp.repeat(embedding[None], self.streams, axis=0)
        write = jnp.zeros(copies.shape[:-1], at_least_float32(embedding).dtype)
        return {"streams": copies, "write": write}, {}

    def read(self, params, carry, history, s):
        gates, columns = self.gates(params), self.columns(params)
        x, streams, write = read_streams(
            self.weigh, self.eps, gates, columns, params["norm"], carry["streams"]
        )
        carry = {"streams": streams, "write": write.astype(carry["write"].dtype)}
        return x, None, carry, history

    def write(self, params, carry, y, aux, s):
        added = carry["write"][..., None] * at_least_float32(y)
        streams = (at_least_float32(carry["streams"]) + added).astype(carry["streams"].dtype)
        return {**carry, "streams": streams}, None

    def finish(self, params, carry, history):
        return rms_norm(self.collapse(carry["streams"]), params["norm"], self.eps)

    def stream(self, carry):
        return self.collapse(carry["streams"])

    def depth_state(self, params, carry, history, s):
        """The streams side by side, [..., m D]."""
        streams = jnp.moveaxis(carry["streams"], 0, -2)
        return streams.reshape(*streams.shape[:-2], -1)

    def layer_tensor(self, carry):
        return carry["streams"]

    def with_layer_tensor(self, carry, tensor):
        return {**carry, "streams": tensor}

    def slots(self, layers):
        """The streams."""
        return np.ones(self.streams, np.float32)

    def paths(self, params, before, y, after, s):
        if s is None:
            collapsed = self.collapse(jnp.eye(self.streams)[:, None])  # [1, m]: streams as features
            return Paths(collapsed[0])
        seen = self.observe(params, *before, s)
        return Paths(seen["read"], seen["transport"], seen["write"])

    def swap_routing(self, params, i, j):
        """All but the norms of the branches."""
        swapped = {k: swap_rows(params[k], i, j) | {"norm": params[k]["norm"]} for k in KINDS}
        return {**params, **swapped}

    def elements_moved(self, layers, width):
        """Unfused, as the paper counts mHC: coefficients, pre-map, post-map, transport and merge
        one by one (Attention Residuals, table 1)."""
        m = self.streams
        return {"unfused": (8.0 * m + 2) * width + 2 * m * m + 4 * m}

    def observe(self, params, carry, history, s):
        """{"read" [..., m], "write" [..., m], "transport" [..., m, m]} of sublayer s; the final
        read has none."""
        if s is None:
            return {}
        read, write, transport = self.weights(params, carry["streams"])
        return {
            "read": jnp.moveaxis(read, 0, -1),
            "write": jnp.moveaxis(write, 0, -1),
            "transport": jnp.moveaxis(transport, (0, 1), (-2, -1)),
        }


def selected_stream(kind: int, streams: int, selected: float, other: float):
    """Initializer of [rows, m]: `selected` at stream s mod m of sublayer s, `other` elsewhere."""

    def init(key, shape, dtype):
        s = 2 * jnp.arange(shape[0]) + kind
        return jnp.where(jax.nn.one_hot(s % streams, streams, dtype=bool), selected, other).astype(
            dtype
        )

    return init


@dataclasses.dataclass(frozen=True, kw_only=True)
class HC(StreamResidual):
    """Hyper-Connections with dynamic weights (Zhu et al. 2024, arXiv 2409.19606).

    With n_j the unit-RMS stream j and a_jt = static_alpha_jt + dynamic_alpha_scale
    tanh(n_j . dynamic_alpha_proj_t), t = 0..m: the branch reads sum_j a_j0 H_j, new stream t is
    sum_j a_j,t+1 H_j, plus b_t times the branch output, b from the beta parameters alike.

    Init: reads stream s mod m, carries each stream on, writes to all with weight 1; projections 0,
    scales 0.01. The final read sums the streams. Adds 2 L ((m + 2) D + m (m + 2) + 2) parameters.
    """

    name = "hc"
    projections = ("dynamic_alpha_proj", "dynamic_beta_proj")

    def connection(self, kind, width):
        m, normal = self.streams, jax.nn.initializers
        select = selected_stream(kind, m, 1.0, 0.0)

        def static_alpha(key, shape, dtype):
            identity = jnp.broadcast_to(jnp.eye(m, dtype=dtype), (*shape[:-2], m, m))
            read = select(key, shape[:-1], dtype)[..., None]
            return jnp.concatenate([read, identity], axis=-1)

        scale = Parameter((), normal.constant(0.01))
        return {
            "static_alpha": Parameter((m, m + 1), static_alpha, decay="never"),
            "dynamic_alpha_proj": Parameter((width, m + 1), normal.zeros, decay="matrix"),
            "dynamic_alpha_scale": scale,
            "static_beta": Parameter((m,), decay="never"),
            "dynamic_beta_proj": Parameter((width,), normal.zeros, decay="matrix"),
            "dynamic_beta_scale": scale,
        }

    def columns(self, params):
        beta = params["dynamic_beta_proj"][:, None]
        return jnp.concatenate([params["dynamic_alpha_proj"], beta], axis=-1)

    def weigh(self, gates, products, squares):
        products = products * jax.lax.rsqrt(squares + 1e-8)  # those of the normalised streams
        alpha, beta = gates["dynamic_alpha_scale"], gates["dynamic_beta_scale"]
        alpha = alpha * jnp.tanh(products[:-1]) + jnp.swapaxes(gates["static_alpha"], 0, 1)
        return alpha[0], beta * jnp.tanh(products[-1]) + gates["static_beta"], alpha[1:]

    def flops_per_token(self, layers, width):
        """A sublayer: 2 m (m + 2) D for the gates, 2 m (m + 1) D for read and transport, 2 m D for
        the write; m = 4 gives DepthBench's 192 D a layer."""
        m = self.streams
        return 2 * layers * width * (2 * m * (m + 2) + 2 * m * (m + 1) + 2 * m)

    def matmul_flops_per_token(self, layers, width):
        """The projections of the gates: m + 2 columns a stream."""
        m = self.streams
        return 2 * layers * width * 2 * m * (m + 2)
