"""How the TPU kernels of streams cut their work, and the pieces that both directions use."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from depthjax.kernels.bf16_terms import bf16_terms
from depthjax.kernels.choice import MIB, small_vmem

LANES = 128
FOR_BLOCKS = 0.55
"""The part of a kernel's VMEM that blocks of tokens x width take, two of each, beside what stays
there: the rest is for the numbers of tokens and for registers that overflow."""
MOST_FOR_BLOCKS = 28 * MIB
IN_A_ROW = 2**18
"""Tokens x width that are spelled out, for the scheduler to fill gaps of one chunk with another."""
CHUNK = 16
"""Tokens whose sums are formed at a time: as many as rows of a bfloat16 register."""
PAIRED = 32


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Sizes of a call: m streams [m, T, D] of a dtype, whose tokens are taken in blocks of `groups`
    groups of `group`. columns: c of them for each stream (own_columns: each has its own), or 0;
    gates: numbers that the weights take beside."""

    streams: int
    tokens: int
    width: int
    dtype: Any
    group: int
    groups: int
    columns: int = 0
    own_columns: bool = False
    gates: int = 0

    @classmethod
    def of(cls, streams: jax.Array, columns: jax.Array | None, gates: int) -> "Blocks | None":
        """For streams [m, T, D]; None where not even 16 tokens fit, or a token has more numbers
        than a register has lanes. Fewer tokens than a group are counted as one."""
        m, tokens, width = streams.shape
        dtype = jnp.dtype(streams.dtype)
        padded = -(-width // LANES) * LANES
        resident = 0 if columns is None else 4 * columns.size * (2 + 2)
        room = min(MOST_FOR_BLOCKS, FOR_BLOCKS * (vmem_limit() - resident))
        fitting = int(room // (2 * (3 * m + 1) * padded * dtype.itemsize))
        if fitting < CHUNK:
            return None
        needed = max(CHUNK, pl.next_power_of_2(tokens))
        group = min(LANES, needed, 2 ** int(math.log2(fitting)))
        groups = max(1, min(8, fitting // group, tokens // group))
        if tokens % group == 0:
            groups = next(n for n in range(groups, 0, -1) if tokens // group % n == 0)
        count = 0 if columns is None else columns.shape[-1]
        own = columns is not None and columns.ndim == 3
        blocks = cls(m, max(tokens, group), width, dtype, group, groups, count, own, gates)
        return blocks if max(blocks.small_rows, 2 + 2 * m + m * m) <= LANES else None

    @property
    def block(self) -> int:
        return self.groups * self.group

    @property
    def steps(self) -> int:
        return pl.cdiv(self.tokens, self.block)

    @property
    def parts(self) -> int:
        """In which the blocks are summed over, for the two cores of some chips."""
        return 2 if self.steps % 2 == 0 else 1

    @property
    def all_groups(self) -> int:
        return self.steps * self.groups

    @property
    def ragged(self) -> bool:
        """Whether the last block ends behind the last token."""
        return self.tokens % self.block != 0

    @property
    def padded_columns(self) -> int:
        return -(-self.columns // 8) * 8

    @property
    def column_blocks(self) -> int:
        return self.streams if self.own_columns else 1

    @property
    def product_rows(self) -> int:
        """Products of a token."""
        return self.columns * (1 if self.own_columns else self.streams)

    @property
    def small_rows(self) -> int:
        """Numbers of a token that the forward kernel leaves, filled up to whole registers."""
        return -(-(3 * self.streams + self.product_rows) // 8) * 8

    @property
    def lanes(self) -> list[slice]:
        """Slices of the width that are worked on at a time."""
        size = next((n for n in (512, 384, 256, LANES) if self.width % n == 0), self.width)
        return [slice(start, start + size) for start in range(0, self.width, size)]

    @property
    def paired(self) -> int:
        """Tokens whose products in pairs are formed at a time."""
        return min(PAIRED, self.group)

    @property
    def terms(self) -> int:
        """In which a fp32 number is multiplied with a stream."""
        return 3 if self.dtype == jnp.bfloat16 else 1

    def rows(self, i, start=None):
        """The tokens of group i in a block, or a chunk of them."""
        if start is None:
            return pl.ds(pl.multiple_of(i * self.group, self.group), self.group)
        return pl.ds(pl.multiple_of(i * self.group + start, CHUNK), CHUNK)

    def chunks(self, body: Callable, size: int = CHUNK) -> None:
        """body(start) for the chunks of a group, of so many tokens, some of them in a row."""
        count, fitting = self.group // size, max(1, IN_A_ROW // (size * self.width))
        unroll = min(count, 2 ** int(math.log2(fitting)))
        jax.lax.fori_loop(0, count, lambda k, _: body(k * size), None, unroll=unroll)

    def cost(self, operands, results, passes: int) -> pl.CostEstimate:
        """Every operand and result once. passes: over all pairs of streams."""
        size = self.tokens * self.width * self.streams
        arrays = [*operands, *results]
        return pl.CostEstimate(
            flops=2 * passes * size * (self.streams + 2)
            + 2 * (passes - 1) * self.terms * size * self.padded_columns,
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays),
            transcendentals=self.tokens * (self.product_rows + 1),
        )

    def tokens_of(self, x: jax.Array, step, axes: tuple[int, int], start=0) -> jax.Array:
        """x with zeros for tokens behind the last. axes: of x, that count groups and tokens of a
        group (negative: none); start: the first token of x in the block."""
        if not self.ragged:
            return x
        index = step * self.block + start
        for axis, factor in zip(axes, (self.group, 1), strict=True):
            if axis >= 0:
                index += factor * jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
        return jnp.where(index < self.tokens, x, 0)

    def measured(self, small_ref) -> tuple[jax.Array | None, jax.Array]:
        """(products, mean squares) as `weigh` takes them, [..., groups, group]."""
        m, c = self.streams, self.columns
        squares = rows_of(small_ref, 2 * m, m)
        if not c:
            return None, squares
        if self.own_columns:
            return rows_of(small_ref, 3 * m, c), squares
        each = [rows_of(small_ref, 3 * m + j * c, c) for j in range(m)]
        return jnp.stack(each, axis=1), squares


def vmem_limit() -> int:
    """Bytes of VMEM that a kernel may take."""
    return (15 if small_vmem() else 56) * MIB


def dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """The product of two matrices over these axes, exact to fp32."""
    precision = "highest" if a.dtype == jnp.float32 else "default"
    return jax.lax.dot_general(
        a,
        b,
        ((axes[:1], axes[1:]), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def split(x: jax.Array, dtype: Any) -> list[jax.Array]:
    """fp32 numbers as a sum of numbers of this dtype: three of bfloat16, or themselves."""
    return bf16_terms(x) if dtype == jnp.bfloat16 else [x]


def total(parts: list[jax.Array]) -> jax.Array:
    """The sum over lanes, [rows, 1], of all parts [rows, lanes]."""
    return jnp.sum(sum(parts), axis=-1, keepdims=True)


def as_columns(columns: list[jax.Array]) -> jax.Array:
    """[rows, 128] with these columns [rows, 1] in front."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (columns[0].shape[0], LANES), 1)
    result = jnp.zeros(lane.shape, jnp.float32)
    for k, column in enumerate(columns):
        result = jnp.where(lane == k, column, result)
    return result


def column_of(columns: jax.Array) -> Callable[[int], jax.Array]:
    """The inverse: [rows, 1] by number."""
    return lambda k: columns[:, k : k + 1]


def put_rows(ref, start: int, values) -> None:
    """Numbers of all tokens of a block, each [groups, group], into [groups, rows, group]."""
    for k, value in enumerate(values):
        ref[:, start + k, :] = value


def rows_of(ref, start: int, count: int) -> jax.Array:
    """[count, groups, group]: the inverse."""
    return jnp.stack([ref[:, start + k, :] for k in range(count)])


def pairs(b: Blocks, new_ref, old_ref, scratch, i, beside: Callable) -> list[jax.Array]:
    """For each stream H_j the products G_t . H_j of group i, [m, group], tokens on lanes.

    On the matrix unit: those of few tokens with each other, of which the ones of a token with
    itself are kept. scratch: [., m, few m]; beside: what is done meanwhile for each chunk, of its
    start.
    """
    m, size = b.streams, b.paired
    shape = m * size, m * size
    same = jax.lax.broadcasted_iota(jnp.int32, shape, 0) % size
    same = same == jax.lax.broadcasted_iota(jnp.int32, shape, 1) % size

    def few(first):
        rows = pl.ds(pl.multiple_of(i * b.group + first, size), size)
        new, old = (ref[:, rows, :].reshape(m * size, b.width) for ref in (new_ref, old_ref))
        product = jnp.where(same, dot(new, old, (1, 1)), 0)
        scratch[first // size] = jnp.sum(product.reshape(m, size, m * size), axis=1)
        for start in range(0, size, CHUNK):
            beside(first + start)

    b.chunks(few, size)
    found = [scratch[k] for k in range(b.group // size)]
    each = [[x[:, j * size : (j + 1) * size] for x in found] for j in range(m)]
    return [jnp.concatenate(x, axis=1) for x in each]


def products(b: Blocks, columns_ref, streams_ref, i, beside: Callable) -> list[jax.Array]:
    """The products of the streams of group i with their columns, [c, group] each: of every stream,
    or of all of them together; none without columns. beside: see `pairs`."""
    found = []
    for j in range(b.streams):
        if b.columns:
            columns = columns_ref[j if b.own_columns else 0]
            found.append(dot(columns, streams_ref[j, b.rows(i), :], (1, 1)))
        for start in range(j * CHUNK, b.group, b.streams * CHUNK):
            beside(start)
    found = [sum(found)] if b.columns and b.own_columns else found
    return [sum(_parts(x, b.terms))[: b.columns] for x in found]


def _parts(x: jax.Array, count: int) -> list[jax.Array]:
    size = x.shape[0] // count
    return [x[k * size : (k + 1) * size] for k in range(count)]


@dataclasses.dataclass(frozen=True)
class ByProducts:
    """The cotangents of the products of a block: as rows [groups, n, padded columns, group], and
    those of the group at hand as columns, [n, group, terms * columns], for n = 1 or m streams."""

    b: Blocks
    rows: Any
    columns: Any

    @staticmethod
    def scratch(b: Blocks) -> list:
        """Where they lie: nowhere without columns."""
        if not b.columns:
            return []
        n = 1 if b.own_columns else b.streams
        shapes = (b.groups, n, b.padded_columns, b.group), (n, b.group, b.terms * b.padded_columns)
        return [pltpu.VMEM(shapes[0], jnp.float32), pltpu.VMEM(shapes[1], b.dtype)]

    def put(self, values: jax.Array) -> None:
        """values: [c, groups, group], or [c, m, groups, group] for m streams."""
        self.rows[...] = jnp.zeros(self.rows.shape, jnp.float32)
        values = values[:, None] if self.b.own_columns else values
        for c in range(values.shape[0]):
            for n in range(values.shape[1]):
                self.rows[:, n, c, :] = values[c, n]

    def start(self, i, by_columns_ref, streams_ref, step) -> None:
        """Turns those of group i to columns, and adds what they make of by_columns."""
        b = self.b
        for n in range(self.rows.shape[1]):
            terms = split(self.rows[i, n], b.dtype)
            met = [terms[0], terms[0], terms[1]] if len(terms) > 1 else terms
            met = jnp.concatenate([x.astype(jnp.float32) for x in met])
            self.columns[n] = met.T.astype(b.dtype)
            terms = jnp.concatenate([x.astype(jnp.float32) for x in terms]).astype(b.dtype)
            for j in range(b.streams) if b.own_columns else [n]:
                old = b.tokens_of(streams_ref[j, b.rows(i), :], step, (-1, 0), i * b.group)
                by_columns_ref[j if b.own_columns else 0] += sum(
                    _parts(dot(terms, old, (1, 0)), b.terms)
                )

    def at(self, j: int, columns_ref, start, lanes) -> jax.Array:
        """What they leave at a chunk of stream j."""
        n, own = (0, j) if self.b.own_columns else (j, 0)
        chunk = self.columns[n, self.b.rows(0, start), :]
        return dot(chunk, columns_ref[own, :, lanes], (1, 0))
