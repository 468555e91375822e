"""Manifold-constrained Hyper-Connections: HC whose transport is doubly stochastic."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp

from depthjax.kernels import repeat
from depthjax.residuals.base import Parameter
from depthjax.residuals.hc import StreamResidual, selected_stream

PURPOSES = "pre", "post", "residual"  # of a projection: read, write, transport
GAP = 8.0  # distance of the initial logits: sigmoid(8) = 0.9997, sigmoid(-8) = 0.0003


def sinkhorn(logits: jax.Array, rounds: int, delta: float = 1e-6) -> jax.Array:
    """A doubly stochastic matrix [m, m, ...] by alternating normalisation (Sinkhorn & Knopp 1967).

    The first round is softmax over rows, then columns; `delta` is added after the softmax and to
    each sum (the form of the mHC kernels). Differentiable through all rounds.
    """

    def normalised(matrix, axis: int):
        return matrix * (1 / (jnp.sum(matrix, axis=axis, keepdims=True) + delta))

    matrix = normalised(jax.nn.softmax(logits, axis=1) + delta, 0)
    return repeat(lambda matrix: normalised(normalised(matrix, 1), 0), matrix, rounds - 1)


def log_sinkhorn(logits: jax.Array, rounds: int) -> jax.Array:
    """The same in the log domain: potentials of rows and columns with marginals 1 / m, the result
    times m (DepthBench's code). logits: [m, m, ...]."""
    size = len(logits)
    target = -jnp.log(jnp.asarray(size, logits.dtype))

    def round_(potentials):
        row = target - logsumexp(logits + potentials[1], axis=1)
        return row, target - logsumexp(logits + row, axis=0)

    zeros = jnp.zeros_like(logits[:, :1]), jnp.zeros_like(logits[:1])
    row, column = repeat(round_, zeros, rounds)
    return size * jnp.exp(logits + row + column)


def logsumexp(logits: jax.Array, axis: int) -> jax.Array:
    """log(sum(exp(logits))) of finite logits, the axis kept."""
    most = jax.lax.stop_gradient(jnp.max(logits, axis=axis, keepdims=True))
    return most + jnp.log(jnp.sum(jnp.exp(logits - most), axis=axis, keepdims=True))


def permutation_mixture(logits: jax.Array, size: int) -> jax.Array:
    """A doubly stochastic matrix [m, m, ...] without iterating: the mixture of all m! permutation
    matrices with softmax weights (Birkhoff; mHC-lite, arXiv 2601.05732).

    logits: [m!, ...], in the order of itertools.permutations, the identity first; size: m.
    """
    weights = jnp.split(jax.nn.softmax(logits, axis=0), len(logits))
    permutations = list(itertools.permutations(range(size)))

    def entry(i: int, j: int):
        return sum(w for w, order in zip(weights, permutations, strict=True) if order[i] == j)

    entries = [entry(i, j) for i in range(size) for j in range(size)]
    return jnp.concatenate(entries).reshape(size, size, *logits.shape[1:])


def near_identity(key, shape, dtype) -> jax.Array:
    """Initializer of transport logits [..., m, m]: 0 on the diagonal, -8 elsewhere."""
    return jnp.broadcast_to(GAP * (jnp.eye(shape[-1]) - 1), shape).astype(dtype)


def _normalised(products: jax.Array, squares: jax.Array, eps: float) -> jax.Array:
    """The products of the concatenation of all streams, as if it had unit RMS."""
    return products * jax.lax.rsqrt(jnp.mean(squares, axis=0) + eps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MHC(StreamResidual):
    """mHC as DepthBench trains it (Xie et al. 2025, arXiv 2512.24880; DepthBench, appendix A).

    With z the unit-RMS concatenation of the streams and mix = z phi: read = sigmoid(alpha_pre
    mix_pre + b_pre), write = 2 sigmoid(alpha_post mix_post + b_post), transport =
    sinkhorn(alpha_res mix_res + b_res). Init: phi 0, gains 0.01, and biases with a gap of 8: reads
    stream s mod m, carries each stream on, writes with weight 1. The final read averages the
    streams. Adds 2 L (m D (m^2 + 2 m) + m^2 + 2 m + 3) parameters.
    """

    name = "mhc"
    projections = ("phi",)
    positive = ("eps", "streams", "sinkhorn_rounds", "stream_eps")
    sinkhorn_rounds: int = 20
    """Alternations of row and column normalisation, the softmax counted as the first half one."""
    sinkhorn_delta: float = 1e-6
    """Added to entries and sums while normalising, 0 or more."""
    stream_eps: float = 1e-6
    """Epsilon of the norm over all streams."""

    def fill_in(self, layers, kv_shape):
        if self.sinkhorn_delta < 0:
            raise ValueError(f"sinkhorn_delta is {self.sinkhorn_delta}: give 0 or more")
        return self

    def connection(self, kind, width):
        m, normal = self.streams, jax.nn.initializers
        select = selected_stream(kind, m, GAP, -GAP)

        def bias(key, shape, dtype):
            read = select(key, (*shape[:-1], m), dtype)
            transport = near_identity(key, (*shape[:-1], m, m), dtype).reshape(*shape[:-1], m * m)
            return jnp.concatenate([read, jnp.zeros_like(read), transport], axis=-1)

        gain = Parameter((), normal.constant(0.01), decay="never", float32=True)
        columns = m * m + 2 * m
        return {
            "phi": Parameter((m * width, columns), normal.zeros, decay="matrix"),
            "b": Parameter((columns,), bias, decay="never", float32=True),
            "alpha_pre": gain,
            "alpha_post": gain,
            "alpha_res": gain,
        }

    def columns(self, params):
        return params["phi"].reshape(self.streams, -1, params["phi"].shape[-1])

    def weigh(self, gates, products, squares):
        m, mix = self.streams, _normalised(products, squares, self.stream_eps)
        bias = gates["b"]
        read = jax.nn.sigmoid(gates["alpha_pre"] * mix[:m] + bias[:m])
        write = 2 * jax.nn.sigmoid(gates["alpha_post"] * mix[m : 2 * m] + bias[m : 2 * m])
        logits = gates["alpha_res"] * mix[2 * m :] + bias[2 * m :]
        logits = logits.reshape(m, m, *logits.shape[1:])
        return read, write, sinkhorn(logits, self.sinkhorn_rounds, self.sinkhorn_delta)

    def collapse(self, streams):
        return (super().collapse(streams) / self.streams).astype(streams.dtype)

    def flops_per_token(self, layers, width):
        """A sublayer: 2 m (m^2 + 2 m) D for phi, 2 m (m + 1) D for read and transport, 2 m D for
        the write; m = 4 gives DepthBench's 480 D a layer."""
        m = self.streams
        return 2 * layers * width * (2 * m * (m * m + 2 * m) + 2 * m * (m + 1) + 2 * m)

    def matmul_flops_per_token(self, layers, width):
        """phi."""
        m = self.streams
        return 2 * layers * width * 2 * m * (m * m + 2 * m)

    def rereading_matmul_flops_per_token(self, layers, width):
        """phi once more; its transpose as a block diagonal of m blocks, where one is counted."""
        return self.streams * self.matmul_flops_per_token(layers, width)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ProjectedMHC(StreamResidual):
    """mHC with one projection a purpose. Subclasses say what the transport is made from."""

    projections = tuple(f"{name}_dynamic_proj" for name in PURPOSES)

    @property
    def transport_shape(self) -> tuple[int, ...]:
        """Of the logits of one transport."""
        raise NotImplementedError

    def transport_init(self, key, shape, dtype) -> jax.Array:
        """Initializer of these logits."""
        raise NotImplementedError

    def transport(self, logits: jax.Array) -> jax.Array:
        """The transport [s, t, ...] from stream s to new stream t; logits: [c, ...]."""
        raise NotImplementedError

    def connection(self, kind, width):
        m, normal = self.streams, jax.nn.initializers

        def purpose(name: str, shape: tuple[int, ...], bias) -> dict[str, Parameter]:
            return {
                f"{name}_bias": Parameter(shape, bias, decay="never", float32=True),
                f"{name}_dynamic_proj": Parameter(
                    (m * width, math.prod(shape)), normal.zeros, decay="matrix", float32=True
                ),
                f"{name}_gate": Parameter((), normal.constant(0.01), float32=True),
            }

        return {
            **purpose("pre", (m,), selected_stream(kind, m, GAP, -GAP)),
            **purpose("post", (m,), normal.zeros),
            **purpose("residual", self.transport_shape, self.transport_init),
        }

    def columns(self, params):
        matrices = [params[f"{name}_dynamic_proj"] for name in PURPOSES]
        side_by_side = jnp.concatenate(matrices, axis=-1)
        return side_by_side.reshape(self.streams, -1, side_by_side.shape[-1])

    def weigh(self, gates, products, squares):
        m = self.streams
        parts = jnp.split(_normalised(products, squares, 1e-8), [m, 2 * m])
        shapes = (m,), (m,), self.transport_shape

        def logits(name: str, part: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            part = part.reshape(*shape, *part.shape[1:])
            return gates[f"{name}_gate"] * part + gates[f"{name}_bias"]

        pre, post, residual = map(logits, PURPOSES, parts, shapes)
        transport = jnp.swapaxes(self.transport(residual), 0, 1)
        return jax.nn.sigmoid(pre), 2 * jax.nn.sigmoid(post), transport

    def flops_per_token(self, layers, width):
        """As `MHC`, with as many columns for the transport as it has logits."""
        m = self.streams
        columns = 2 * m + math.prod(self.transport_shape)
        return 2 * layers * width * (2 * m * columns + 2 * m * (m + 1) + 2 * m)

    def matmul_flops_per_token(self, layers, width):
        """The projections."""
        m = self.streams
        columns = 2 * m + math.prod(self.transport_shape)
        return 2 * layers * width * 2 * m * columns

    def rereading_matmul_flops_per_token(self, layers, width):
        """As `MHC`."""
        return self.streams * self.matmul_flops_per_token(layers, width)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MHCNative(_ProjectedMHC):
    """mHC in the log domain, with one projection a purpose (DepthBench's code).

    As `MHC`, but the norm over all streams has eps 1e-8, the transport comes from `log_sinkhorn`,
    in which new stream t takes M[s, t] of stream s, and the final read sums. All connectors fp32.
    """

    name = "mhc_native"
    positive = ("eps", "streams", "sinkhorn_rounds")
    sinkhorn_rounds: int = 20
    """Alternations of row and column updates."""

    @property
    def transport_shape(self):
        return self.streams, self.streams

    def transport_init(self, key, shape, dtype):
        return near_identity(key, shape, dtype)

    def transport(self, logits):
        return log_sinkhorn(logits, self.sinkhorn_rounds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MHCLite(_ProjectedMHC):
    """mHC-lite: as `MHCNative`, but the transport is a softmax mixture of all m! permutations,
    exactly doubly stochastic without iterating (arXiv 2601.05732; a baseline of Attention
    Residuals).

    Init of its logits: 0 for the identity, -8 for the other permutations. Adds 2 L (m D (m! + 2 m)
    + m! + 2 m + 3) parameters.
    """

    name = "mhc_lite"

    def fill_in(self, layers, kv_shape):
        if self.streams > 5:
            raise ValueError(f"streams is {self.streams}, with m! permutations: give at most 5")
        return self

    @property
    def transport_shape(self):
        return (math.factorial(self.streams),)

    def transport_init(self, key, shape, dtype):
        identity = jnp.arange(shape[-1]) == 0
        return jnp.broadcast_to(jnp.where(identity, 0.0, -GAP), shape).astype(dtype)

    def transport(self, logits):
        return permutation_mixture(logits, self.streams)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MHCStatic(StreamResidual):
    """mHC whose weights do not depend on the token (DepthBench's code).

    read = softmax(H_pre_logits), write = softmax(H_post_logits), transport = log_sinkhorn of
    H_res_logits / tau; the final read sums. Init with a gap of 8 as `MHC`. Adds 2 L (m^2 + 2 m)
    parameters.
    """

    name = "mhc_static"
    positive = ("eps", "streams", "sinkhorn_rounds", "sinkhorn_tau")
    sinkhorn_rounds: int = 20
    """Alternations of row and column updates."""
    sinkhorn_tau: float = 1.0
    """What the transport logits are divided by."""

    def connection(self, kind, width):
        m, zeros = self.streams, jax.nn.initializers.zeros
        select = selected_stream(kind, m, 0.0, -GAP)
        return {
            "H_pre_logits": Parameter((m,), select, decay="never", float32=True),
            "H_post_logits": Parameter((m,), zeros, decay="never", float32=True),
            "H_res_logits": Parameter((m, m), near_identity, decay="never", float32=True),
        }

    def weigh(self, gates, products, squares):
        def for_all_tokens(weights: jax.Array) -> jax.Array:
            small = weights.ndim - squares.ndim + 1
            return jnp.broadcast_to(weights, (*weights.shape[:small], *squares.shape[1:]))

        read, write = (
            jax.nn.softmax(gates[f"H_{name}_logits"], axis=0) for name in ("pre", "post")
        )
        transport = log_sinkhorn(gates["H_res_logits"] / self.sinkhorn_tau, self.sinkhorn_rounds)
        transport = jnp.swapaxes(transport, 0, 1)
        return for_all_tokens(read), for_all_tokens(write), for_all_tokens(transport)

    def flops_per_token(self, layers, width):
        """A sublayer: 2 m (m + 1) D for read and transport, 2 m D for the write."""
        m = self.streams
        return 2 * layers * width * (2 * m * (m + 1) + 2 * m)
