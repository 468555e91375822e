"""Attention Residuals: each sublayer reads a softmax mixture of what earlier depth produced.

Attention Residuals, arXiv 2603.15031; the output norm that
follows each mixture shares its epsilon, as in DepthBench.

One state serves all block sizes. The history holds the finished sources, the carry the open sum R:

    begin   no rows yet, R = embedding
    read    mix the finished rows and R, then RMSNorm
    write   at a boundary (s divisible by b): append R as a finished row and let R = y;
            elsewhere R = R + y

so the embedding is the first finished source, and with b = 1 every sublayer output is a source of
its own. Reader s has 1 + ceil(s / b) sources.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from depthjax.kernels import (
    depth_mix,
    depth_read,
    depth_weights,
    gather_rows,
    mix_rows,
    phase1,
    phase2,
    rms_norm,
)
from depthjax.kernels.choice import choose
from depthjax.kernels.rms_norm import at_least_float32
from depthjax.residuals.base import (
    ATTENTION,
    KINDS,
    Parameter,
    Paths,
    Residual,
    empty_history,
    swap_rows,
)

MIXER = ("query", "key_scale", "logit_scale", "source_bias")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _AttnRes(Residual):
    positive = ("eps", "mix_eps")
    limits: ClassVar[Mapping[str, str]] = {
        "usefulness": "later layers read the outputs of a layer, not only the sum that it hands on",
        "jacobian_norms": "later layers read the outputs of a layer, not only the sum it hands on",
        "permutation_score_routing": Residual.limits["permutation_score_routing"],
        "transport_effective_rank": "its sources stay as they are: nothing transports them",
    }
    eps: float = 1e-6
    """Epsilon of the norm of the very first read, which sees the embedding alone."""
    mix_eps: float = 1e-6
    """Epsilon of the key norms and of the norms that follow a mixture (DepthBench: 1e-5)."""
    logit_scale: bool = False
    """Multiply the logits of each reader by exp(s), s learned from 0 (DepthBench's code)."""
    topk: float | None = None
    """Mix the largest logits only, this fraction of a reader's sources rounded up (same place)."""
    bias: bool = False
    """Add a learned bias from 0 to the logit of each source of a reader (same place)."""

    @property
    def block(self) -> int:
        """Sublayers whose outputs are summed into one source."""
        raise NotImplementedError

    def fill_in(self, layers, kv_shape):
        if self.topk is not None and not 0 < self.topk <= 1:
            raise ValueError(f"topk is {self.topk}: give a fraction of the sources, above 0 to 1")
        return self

    def sources(self, s: int) -> int:
        """How many sources reader s mixes, the open sum included: 1 + ceil(s / b)."""
        return 1 - (-s // self.block)

    def rows_before(self, s):
        """The finished ones of these sources: ceil(s / b)."""
        return self.sources(s) - 1

    def appends(self, kind):
        """Boundaries of even blocks are all in front of attention."""
        return kind == ATTENTION or self.block % 2 == 1

    def rows(self, layers: int) -> int:
        """Sources that are finished in the end, which the history has room for."""
        return self.rows_before(2 * layers)

    def parameters(self, layers, width):
        zeros = jax.nn.initializers.zeros

        def reader(first_layer: int = 0) -> dict[str, Parameter]:
            mixer = {"query": (width,)}
            mixer |= {"logit_scale": ()} if self.logit_scale else {}
            # By the age of a source; a reader with fewer sources leaves the rest at zero.
            mixer |= {"source_bias": (self.rows(layers) + 1,)} if self.bias else {}
            declared = {n: Parameter(s, zeros, first_layer, float32=True) for n, s in mixer.items()}
            declared["key_scale"] = Parameter((width,), first_layer=first_layer, float32=True)
            return {"norm": Parameter((width,)), **declared}

        # The first attention has one source, the embedding: nothing to mix, so no mixer.
        return {"attention": reader(first_layer=1), "mlp": reader(), "final": reader()}

    def begin(self, embedding, layers):
        rows = self.rows(layers)
        carry = {"open": embedding, "count": jnp.int32(0), "bypass": jnp.bool_(False)}
        return carry, empty_history(embedding, rows)

    def _sources(self, params, carry, history, s):
        """The arguments that `depth_mix` and `depth_weights` share. s = None: the final read."""
        boundary = True if s is None else s % self.block == 0
        # After a skipped layer a boundary reader takes the open sum unmixed: no row is live to it.
        count = jnp.where(carry["bypass"] & boundary, 0, carry["count"])
        eps = self.mix_eps if s is None else jnp.where(s == 0, self.eps, self.mix_eps)
        shared = {"count": count, "newest": carry["open"], "eps": eps}
        query = params["query"]
        if self.logit_scale:
            query = query * jnp.exp(params["logit_scale"])
        if self.bias:
            shared["bias"] = params["source_bias"]
        if self.topk is not None:
            sources = np.arange(1, history.shape[0] + 2)  # count + 1 of them
            shared["keep"] = jnp.asarray(np.ceil(self.topk * sources).astype(np.int32))[count]
        return (history, query, params["key_scale"]), shared

    def read(self, params, carry, history, s):
        x, history, newest = self._mix(params, carry, history, s)
        return x, None, {**carry, "open": newest, "bypass": jnp.bool_(False)}, history

    def _mix(self, params, carry, history, s):
        """(normalised mixture, history, open sum) of reader s; None: the final one."""
        sources, options = self._sources(params, carry, history, s)
        if self.options:
            mixture = depth_mix(*sources, **options, output_scale=params["norm"])
            return mixture, history, carry["open"]
        newest, count, eps = (options[name] for name in ("newest", "count", "eps"))
        return depth_read(history, newest, _direction(params), count, eps, params["norm"])

    def write(self, params, carry, y, aux, s):
        boundary = s % self.block == 0
        opened = jnp.where(boundary, y, carry["open"] + y)
        appended = (carry["open"], carry["count"], boundary)
        return {**carry, "open": opened, "count": carry["count"] + boundary}, appended

    def rereading_matmul_flops_per_token(self, layers, width):
        """Gathering a source's cotangent meets it with all 2 L + 1 readers, three times."""
        return 6 * (2 * layers + 1) ** 2 * width if self.pull() else 0

    @property
    def options(self) -> bool:
        """Whether a reader does more than mix by its query and key scale."""
        return self.logit_scale or self.bias or self.topk is not None

    def pull(self):
        return _Pull(self.eps, self.mix_eps) if self.block == 1 and not self.options else None

    def finish(self, params, carry, history):
        return self._mix(params, carry, history, None)[0]

    def stream(self, carry):
        return carry["open"]

    def observe(self, params, carry, history, s):
        """{"weights": [rows + 1, ...]}: the softmax weights; the open sum is the last source."""
        sources, options = self._sources(params, carry, history, s)
        return {"weights": depth_weights(*sources, **options)}

    def _raw_mixture(self, params, carry, history, s):
        """What reader s mixes, before its norm."""
        sources, options = self._sources(params, carry, history, s)
        return depth_mix(*sources, **options).astype(carry["open"].dtype)

    def depth_state(self, params, carry, history, s):
        """In front of a boundary, and at the end, the raw mixture that is read there; elsewhere the
        open sum (DepthBench, section 7)."""
        mixture = self._raw_mixture(params, carry, history, s)
        return mixture if s is None else jnp.where(s % self.block == 0, mixture, carry["open"])

    def lens(self, params, final, carry, history, s):
        """The raw mixture that is read at the boundary, under the final norm."""
        mixture = self._raw_mixture(params, carry, history, s)
        return _normalized(mixture, final, self.mix_eps, like=mixture)

    def with_layer_tensor(self, carry, tensor):
        return {**carry, "open": tensor}

    def boundaries(self, layers):
        return tuple(range(0, 2 * layers, self.block))

    def slots(self, layers):
        """The finished sources and, last, the open sum."""
        return np.eye(self.rows(layers) + 1, dtype=np.float32)[-1]

    def paths(self, params, before, y, after, s):
        read = jnp.moveaxis(self.observe(params, *before, s)["weights"], 0, -1)
        if s is None:
            return Paths(read)
        slots, boundary = read.shape[-1], s % self.block == 0
        opened = jax.nn.one_hot(slots - 1, slots)
        finished = jax.nn.one_hot(before[0]["count"], slots)  # the row that a boundary closes
        moved = jnp.outer(finished - opened, opened)
        return Paths(read, jnp.eye(slots) + jnp.where(boundary, moved, 0), opened)

    def skip(self, before, after, s):
        """The sum and the finished rows stay as they were, and the next reader, if it stands at a
        boundary, takes the open sum unmixed. Without layer 0 the embedding is a finished source
        and the open sum as well (DepthBench's layer pruning)."""
        carry, _ = before
        _, history = after  # differs from before's only in rows that are not live, or in row 0
        count = jnp.where(s == 0, 1, carry["count"])
        return {**carry, "count": count, "bypass": jnp.bool_(True)}, history

    def swap(self, params, i, j):
        """Exchanges all of two layers but the mixers in front of their attention; those that read
        at their right ends (the next attention's, or the final one) are exchanged instead."""
        attention, final = params["attention"], params["final"]
        swapped = {kind: swap_rows(params[kind], i, j) for kind in KINDS}
        for name in (name for name in MIXER if name in attention):
            rows = jnp.concatenate([attention[name], final[name][None]])
            rows = swap_rows(rows, i + 1, j + 1)
            swapped["attention"][name], final = rows[:-1], {**final, name: rows[-1]}
        return {**swapped, "final": final}

    def flops_per_token(self, layers, width):
        """4 D a source, for its logit and its share of the sum; 1 + ceil(s / b) sources at s."""
        return 4 * width * sum(self.sources(s) for s in range(1, 2 * layers + 1))

    def elements_moved(self, layers, width):
        """With N sources of S sublayers each (Attention Residuals, table 1; its own counts take
        keys and values as two reads, a naive loop reads every source at every sublayer):

        naive 2 ((N + 1) / 2 + (S - 1) / S) + 1, one pass over each source
        (N + 1) / 2 + (S - 1) / S + 1, in units of D.
        """
        sublayers, size = 2 * layers, self.block
        mean = (sublayers / size + 1) / 2 + (size - 1) / size
        moved = {"naive, keys and values apart": 2 * mean + 1, "naive, one pass": mean + 1}
        return {name: count * width for name, count in (self._two_phase(layers) | moved).items()}

    def _two_phase(self, layers: int) -> dict[str, float]:
        """What two phases move, in units of D."""
        raise NotImplementedError


def _direction(params) -> jax.Array:
    """Query times key scale, [..., D] in at least fp32."""
    return at_least_float32(params["query"]) * at_least_float32(params["key_scale"])


def _directions(residual) -> jax.Array:
    """Of all sublayers in order, [2 L, D]."""
    both = [_direction(residual[kind]) for kind in KINDS]  # [L, D] each
    return jnp.stack(both, axis=1).reshape(-1, both[0].shape[-1])


def _normalized(mixture, params, eps, like) -> jax.Array:
    """The norm that follows a mixture, rounded once, to the dtype of `like`."""
    return rms_norm(mixture, params["norm"], eps).astype(like.dtype)


@dataclasses.dataclass(frozen=True)
class _Pull:
    """Full Attention Residuals over one buffer: row i is source i, and each reader sees all."""

    eps: float
    mix_eps: float

    def directions(self, residual, final):
        return jnp.concatenate([_directions(residual), _direction(final)[None]])

    def mix(self, rows, s, direction):
        return mix_rows(rows, s + 1, direction, self.mix_eps)

    def normalize(self, params, mixture, s, like):
        return _normalized(mixture, params, jnp.where(s == 0, self.eps, self.mix_eps), like)

    def gather(self, rows, index, last, directions, lse, delta):
        arrays = rows, index, last, directions, lse, delta
        return gather_rows(*arrays, self.mix_eps, dtype=rows.dtype)

    def state(self, rows, s):
        newest = jax.lax.dynamic_index_in_dim(rows, s, 0, keepdims=False)
        return {"open": newest, "count": jnp.int32(s), "bypass": jnp.bool_(False)}, rows[:-1]


@dataclasses.dataclass(frozen=True)
class _Phases:
    """The readers that see the same finished sources are s = n b + 1 to (n + 1) b."""

    size: int
    eps: float
    mix_eps: float

    directions = staticmethod(_directions)

    def place(self, s):
        return (s - 1) % self.size

    def _boundary(self, s, begun):
        return begun & (self.place(s) == 0)

    def close(self, carry, s, begun):
        boundary = self._boundary(s, begun)
        appended = (carry["open"], carry["count"], boundary)
        return {**carry, "count": carry["count"] + boundary}, appended

    def answer(self, carry, history, directions):
        return phase1(history, directions, count=carry["count"], eps=self.mix_eps)

    def seam(self, params, carry, y, answers, s, begun):
        mixtures, lse = answers
        x, opened = phase2(
            mixtures,
            lse,
            carry["open"],
            y,
            query=_direction(params),
            place=self.place(s),
            fresh=self._boundary(s, begun),
            norm_scale=params["norm"],
            eps=self.mix_eps,
            norm_eps=jnp.where(s == 0, self.eps, self.mix_eps),
        )
        return x, {**carry, "open": opened}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullAttnRes(_AttnRes):
    """Full Attention Residuals: every sublayer output is a source of its own.

    Adds a query (init 0, so all sources weigh the same at first) and a key scale (init 1) to each
    reader but the first: 4 L D parameters. History: 2 L rows.
    """

    name = "full_attnres"

    @property
    def block(self):
        return 1

    def _two_phase(self, layers):
        """S + N, with N groups of S = 16 queries."""
        size = min(16, 2 * layers)
        return {f"two phases of {size}": size + 2 * layers / size}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockAttnRes(_AttnRes):
    """Block Attention Residuals: the outputs of a block of sublayers are summed into one source.

    Parameters as Full. History: ceil(2 L / b) rows. b counts sublayers, two a transformer layer,
    and need not be even or divide 2 L: the last block is then shorter.
    """

    name = "block_attnres"
    block_size_sublayers: int | None = None
    """Sublayers in a block, 1 to 2 L (two sublayers a transformer layer). None: ceil(2 L / 8)."""
    two_phase: bool | None = None
    """Whether the forward pass of an evaluation reads the history once a block instead of once a
    sublayer. None: where its kernels run, on TPU and GPU."""

    @property
    def block(self):
        if self.block_size_sublayers is None:
            raise ValueError("block_size_sublayers is not set: call bind(layers) first")
        return self.block_size_sublayers

    def fill_in(self, layers, kv_shape):
        super().fill_in(layers, kv_shape)
        size = self.block_size_sublayers
        if size is None:
            size = self.of_blocks(8, layers).block_size_sublayers
        if not isinstance(size, int) or not 1 <= size <= 2 * layers:
            raise ValueError(
                f"block_size_sublayers is {size}, but {layers} layers have {2 * layers} sublayers: "
                f"choose 1 to {2 * layers}"
            )
        return dataclasses.replace(self, block_size_sublayers=size)

    def phases(self):
        wanted = self.two_phase
        if wanted is None:
            wanted = choose(None) != "xla"
        return _Phases(self.block, self.eps, self.mix_eps) if wanted and not self.options else None

    def _two_phase(self, layers):
        """N / S + 5."""
        return {"two phases": 2 * layers / self.block**2 + 5}

    def flop_countings(self, layers, width):
        """The study's formula has 2 + floor(k / b) sources at reader k, one more than are read
        whenever b divides k, and 9 at the final read (DepthBench, appendix D)."""
        readers = (2 + k // self.block for k in range(1, 2 * layers))
        published = 4 * width * (sum(readers) + 9)
        return {**super().flop_countings(layers, width), "as published": published}

    @classmethod
    def of_blocks(cls, blocks: int, layers: int, **options) -> "BlockAttnRes":
        """At most `blocks` blocks over `layers` transformer layers: b = ceil(2 L / blocks).

        Raises ValueError for less than one block."""
        if blocks < 1:
            raise ValueError(f"blocks is {blocks}: give at least 1")
        return cls(block_size_sublayers=-(-2 * layers // blocks), **options)

    @classmethod
    def of_layers(cls, block_size_layers: int, **options) -> "BlockAttnRes":
        """From a block size in transformer layers, as Kimi K3 (12, with eps and mix_eps 1e-5) and
        torchtitan count it; as there, the first attention reads the embedding unmixed."""
        return cls(block_size_sublayers=2 * block_size_layers, **options)
