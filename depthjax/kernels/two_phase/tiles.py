"""How the TPU kernels of both phases divide tokens."""

import dataclasses

import jax

from depthjax.kernels.choice import MIB, small_vmem

LANES = 128


def vector_memory() -> tuple[int, int]:
    """Bytes of VMEM that a kernel may hold, and of them its double-buffered blocks; beside them are
    the terms of queries and what the products of a chunk take, 12 MiB at 16 queries of 7168."""
    return (15 * MIB, 11 * MIB) if small_vmem() else (48 * MIB, 30 * MIB)


def sublanes(dtype) -> int:
    """Tokens of a tile: 16 of bf16, 8 of fp32."""
    return 32 // dtype.itemsize


def block_tokens(blocks: jax.Array, queries: int, rows: int = 0) -> int | None:
    """Tokens of a grid step of phase 1, of N sources, `queries` mixtures and `rows` more rows; None
    where not even one tile of them fits. blocks: [N, ..., D]."""
    token = (len(blocks) + queries + rows) * _padded(blocks.shape[-1]) * blocks.dtype.itemsize
    return _largest(256, sublanes(blocks.dtype), 2 * token)


def row_tokens(width: int, token_bytes: int) -> int | None:
    """Tokens of a grid step of phase 2, of `token_bytes` for each entry of the width."""
    return _largest(512, 16, 2 * _padded(width) * token_bytes)


def _padded(width):
    return -(-width // LANES) * LANES


def _largest(most, least, token_bytes):
    while most >= least:
        if most * token_bytes <= vector_memory()[1]:
            return most
        most //= 2
    return None


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Tokens in blocks of `block`, whose small results, tokens on lanes, are in blocks of `lanes`.

    The grid is (parts, groups, inner): two parts where that goes round, for chips of two cores,
    which each sum gradients of parameters for themselves; a group shares a block of lanes.
    """

    tokens: int
    block: int

    @classmethod
    def of(cls, tokens: int, block: int, least: int) -> "Tiling":
        """Of blocks of at most `block` tokens, and no larger than it takes; `least`: a tile."""
        while block // 2 >= max(tokens, least):
            block //= 2
        return cls(tokens, block)

    @property
    def lanes(self) -> int:
        return max(self.block, LANES)

    @property
    def blocks(self) -> int:
        return -(-self.tokens // self.block)

    @property
    def ragged(self) -> bool:
        """Whether the last block goes beyond the tokens."""
        return self.tokens % self.block > 0

    @property
    def grid(self) -> tuple[int, int, int]:
        groups = -(-self.tokens // self.lanes)
        parts = 2 if groups % 2 == 0 else 1
        return parts, groups // parts, min(self.lanes // self.block, self.blocks)

    def group(self, part, group):
        """Index of a block of lanes."""
        return part * self.grid[1] + group

    def step(self, part, group, inner):
        """Index of a block of tokens, which may lie behind the last one."""
        return self.group(part, group) * self.grid[2] + inner

    def token_block(self, part, group, inner):
        """The same, with the last one for those behind it: it is not moved again."""
        step = self.step(part, group, inner)
        last = self.blocks - 1
        return step if self.blocks % self.grid[2] == 0 else jax.numpy.minimum(step, last)
