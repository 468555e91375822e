"""What the TPU kernels of this folder share: blocks of tokens, pieces of them in registers, and
sums along the width.

A block holds tokens on sublanes and the whole width on lanes. Inside a kernel a loop goes over
chunks of tokens, each worked on as pieces of 16 tokens by 512 lanes: what fits in registers.
"""

import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from depthjax.kernels.choice import MIB, small_vmem
from depthjax.kernels.mixture.rule import Keys

LANES = 128
PIECE = 16
"""Tokens of a piece: one tile of a bfloat16 array."""
CHUNK = 64
"""Most tokens of one pass of a loop: enough independent work to hide latencies."""
TILE = 512
"""Most lanes of a piece."""
GROUPS = (4, 2, 1)
"""Rows that a step may take at once, from the most; fewer where the width leaves no room."""
MOST_TOKENS = 512
"""Most tokens of a block."""

FLOAT32 = jnp.float32


def fits(*arrays: jax.Array | None) -> bool:
    """Whether the kernels take arrays of these dtypes: bfloat16 or float32, all the same."""
    dtypes = {jnp.dtype(array.dtype) for array in arrays if array is not None}
    return len(dtypes) == 1 and dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(FLOAT32)}


def vmem_limit() -> int:
    """Bytes of VMEM that a kernel may take: all, or three quarters of what most chips have."""
    return (16 if small_vmem() else 48) * MIB


def room(resident: int = 0) -> int:
    """Bytes for blocks of tokens, both halves of double buffers, beside those that stay: the
    compiler has needs of its own."""
    return vmem_limit() * 3 // 4 - resident


def token_block(tokens: int, bytes_per_token: int, resident: int = 0) -> int:
    """Tokens of a block: a multiple of 128 where there is room, else of 16; no more than hold all
    the tokens."""
    most = min(MOST_TOKENS, room(resident) // bytes_per_token)
    unit = LANES if most >= LANES else PIECE
    return min(max(most // unit * unit, PIECE), -(-tokens // PIECE) * PIECE)


def over_chunks(tokens: int, body: Callable[[pl.Slice], None]) -> None:
    """Calls body(slice of 16 tokens) for every piece of a block, several of them a loop pass."""
    chunk = math.gcd(tokens, CHUNK)

    def run(index, _):
        for piece in range(0, chunk, PIECE):
            body(pl.ds(pl.multiple_of(index * chunk + piece, PIECE), PIECE))

    jax.lax.fori_loop(0, tokens // chunk, run, None)


def lane_tiles(width: int) -> list[slice]:
    """The width in slices of at most 512 lanes."""
    return [slice(start, min(start + TILE, width)) for start in range(0, width, TILE)]


def sum_lanes(parts: Iterable[jax.Array]) -> jax.Array:
    """[tokens, 1]: the sum over the lanes of all parts [tokens, <= 512]."""
    total = {}
    for part in parts:
        size = part.shape[-1]
        total[size] = total[size] + part if size in total else part
    return sum(jnp.sum(part, axis=-1, keepdims=True) for part in total.values())


def wide(ref, tokens: pl.Slice, lanes: slice) -> jax.Array:
    """A piece of a block in float32."""
    return ref[tokens, lanes].astype(FLOAT32)


def score(ref, tokens: pl.Slice, u_ref, eps, keys: Keys) -> tuple[jax.Array, jax.Array]:
    """(e, rho), both [tokens, 1], of the sources v in a piece of a block:
    e = u . v rho, rho = 1 / sqrt(mean(v^2) + eps), or 1 for raw keys."""
    squares, products = [], []
    for lanes in lane_tiles(ref.shape[-1]):
        v = wide(ref, tokens, lanes)
        squares.append(v * v)
        products.append(v * u_ref[:, lanes])
    e = sum_lanes(products)
    if keys == "raw":
        return e, jnp.ones_like(e)
    rho = jax.lax.rsqrt(sum_lanes(squares) / ref.shape[-1] + eps)
    return e * rho, rho


def grouped_row(member: int, group: int, blocks: int = 0, windowed: bool = False) -> Callable:
    """Index map of the block of row `group` * step + member under a count of live rows: grid
    (token block, step) or (part, token block of `blocks` in it, step), with the scalar prefetch
    [first row, rows, ...]. windowed: see `window_row`.

    Behind the last live row the index stays what it was, so that nothing is fetched; a member that
    is never live rests at the very first block.
    """

    def index(*args):
        *place, step, bounds = args
        first, count = bounds[0], bounds[1]
        block = place[0] if len(place) == 1 else place[0] * blocks + place[1]
        # Steps and rows are not negative, which division needs to be told on a scalar core.
        last = jax.lax.div(jnp.maximum(count - 1 - member, 0), group)
        row = window_row(member + group * jnp.minimum(step, last), first, windowed)
        live = member < count
        return jnp.where(live, row, 0), jnp.where(live, block, 0), 0

    return index


def window_row(place, skipped, windowed: bool):
    """The row of the buffer that is read as number `place`: so many further on as are skipped, but
    under a window the first row is always the first that is read."""
    return jnp.where(place == 0, 0, skipped + place) if windowed else skipped + place


def compiler_params(*semantics: str) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=vmem_limit())


def scalars(*values: jax.Array | int) -> jax.Array:
    """Prefetched integers."""
    return jnp.stack([jnp.asarray(value, jnp.int32) for value in values])
