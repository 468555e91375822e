"""What the Mosaic GPU kernels share: a warpgroup that streams feature rows through shared memory.

A block is one warpgroup (128 threads) and works on one token at a time: a feature row [D] lies in
its registers, D / 128 numbers a thread, so that any number of tokens goes and nothing is padded.
Rows come by TMA into a ring of slots in shared memory, several steps ahead of their use. Blocks are
as many as stay resident on the processors, and each takes every blocks-th token. Arrays have D
split in two, [D / 128, 128]: a copy takes no more than 256 elements along an axis.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from depthjax.kernels.choice import gpu_interpreter
from depthjax.kernels.mosaic_gpu import LANES, SHARED_BYTES

PROCESSORS = 132
"""Streaming multiprocessors of an H100 or H200; on a larger chip the others idle."""
AHEAD_BYTES = 32 * 1024
"""A block's bytes under way: with two blocks a processor, the latency of HBM at its bandwidth."""

_LOAD_TAKES_INDEX = "idx" in inspect.signature(plgpu.load).parameters  # jax 0.10
_STORES_EXPLICITLY = hasattr(plgpu, "store")  # jax 0.12


def split(x: jax.Array) -> jax.Array:
    """[..., D] as [..., D / 128, 128]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // LANES, LANES)


def merge(x: jax.Array) -> jax.Array:
    """[..., D / 128, 128] as [..., D]."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * LANES)


def integers(*values: Any) -> jax.Array:
    """int32 numbers, traced or not, as kernels take them."""
    return jnp.stack([jnp.asarray(x, jnp.int32) for x in values])


def numbers(*values: Any) -> jax.Array:
    """fp32 numbers, traced or not, as kernels take them."""
    return jnp.stack([jnp.asarray(x, jnp.float32) for x in values])


def row_type(width: int, dtype: Any, *leading: int) -> jax.ShapeDtypeStruct:
    """An array [*leading, D / 128, 128] in the kernels' form."""
    return jax.ShapeDtypeStruct((*leading, width // LANES, LANES), dtype)


def row_buffer(width: int, dtype: Any, *leading: int) -> Any:
    """The same in shared memory."""
    return plgpu.SMEM((*leading, width // LANES, LANES), dtype)


def _layout(shape: Sequence[int]) -> Any:
    """A row spread over the threads, up to 4 neighbours each: both bf16 and fp32 then move without
    bank conflicts."""
    per_thread = math.prod(shape) // LANES
    return plgpu.Layout.WG_STRIDED(tuple(shape), vec_size=math.gcd(per_thread, 4))


def load(ref: Any, layout: Any = None) -> jax.Array:
    """What lies in shared or global memory, as fp32 in registers; a row without a layout."""
    layout = layout or _layout(ref.shape)
    if _LOAD_TAKES_INDEX:
        row = plgpu.load(ref, (), layout=layout, optimized=False)
    else:
        row = plgpu.load(ref, layout=layout, optimized=False)
    return row.astype(jnp.float32)


def zeros(width: int) -> jax.Array:
    """A row of zeros in registers."""
    shape = (width // LANES, LANES)
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _layout(shape))


@dataclasses.dataclass(frozen=True)
class Ring:
    """Slots of shared memory that steps 0, 1, ... go round. copy(step, slot): starts the copies of
    a step, all of which arrive at barriers.at[slot]."""

    barriers: Any
    slots: int
    copy: Callable[[Any, Any], None]

    def fill(self, steps) -> None:
        """Starts the first steps, of `steps` in all."""
        for step in range(self.slots):
            pl.when(step < steps)(lambda step=step: self.copy(jnp.int32(step), step))

    def wait(self, step):
        """The slot of a step, once its copies have arrived."""
        slot = lax.rem(step, self.slots)
        plgpu.barrier_wait(self.barriers.at[slot])
        return slot

    def release(self, step, steps) -> None:
        """Gives the slot of a step, which all threads have read, to the step that follows in it."""
        plgpu.commit_smem()
        pl.when(step + self.slots < steps)(
            lambda: self.copy(step + self.slots, lax.rem(step, self.slots))
        )


def store(value: jax.Array, ref: Any) -> None:
    """Rounds registers once, into shared or global memory."""
    value = value.astype(ref.dtype)
    if _STORES_EXPLICITLY:
        plgpu.store(ref, value, optimized=False)  # small ones fill no whole sector of memory
    else:
        ref[...] = value


def add(row: jax.Array, ref: Any) -> None:
    """Adds a row of registers to one of fp32 in shared memory, where a thread sees its own part."""
    store(load(ref) + row, ref)


def clear(ref: Any) -> None:
    """Zeros in a row of shared memory."""
    store(zeros(ref.shape[0] * LANES), ref)


def slots_of(bytes_a_step: int) -> int:
    """Steps that a ring holds."""
    return max(2, min(8, -(-AHEAD_BYTES // bytes_a_step)))


def blocks_of(tokens: int, shared_bytes: int, live_rows: int, width: int) -> int:
    """Blocks that a call starts: those that stay on the processors at once, by shared memory and by
    registers, where `live_rows` rows are live; one a token at most."""
    registers = LANES * min(255, 40 + live_rows * width // LANES)
    a_processor = min(8, SHARED_BYTES // (shared_bytes + 2048), 65536 // registers)
    return min(tokens, PROCESSORS * max(1, a_processor))


def tokens_of(block, blocks: int, tokens: int):
    """How many of `tokens` a block takes: block, block + blocks, ..."""
    return lax.div(tokens - block + (blocks - 1), blocks)


def cost(tokens: int, width: int, moved: Sequence[tuple[float, Any]], flops: float) -> Any:
    """What a kernel tells the compiler: moved: (rows [T, D], dtype) of the arrays; flops: for each
    element. Small arrays are left out; of rows under a traced count, the mean over its values."""
    elements = tokens * width
    moved_bytes = sum(rows * elements * jnp.dtype(dtype).itemsize for rows, dtype in moved)
    return pl.CostEstimate(
        flops=round(flops * elements), bytes_accessed=round(moved_bytes), transcendentals=0
    )


def launch(body: Callable, call: Any, blocks: int, out_type: Any, scratch: dict):
    """The kernel that runs body(block, *refs, **scratch) on `blocks` warpgroups, over arrays and
    over `jax.Ref`s, which it changes in place; simulated where there is no GPU. call: (name,
    cost)."""
    name, estimate = call
    # pl.kernel, not plgpu.kernel: that one takes no jax.Ref on jax 0.10.
    mesh = plgpu.Mesh(
        grid=(blocks,), grid_names=("block",), cluster=(), cluster_names=(), num_threads=None,
        thread_name=None,
    )  # fmt: skip

    def scoped(*refs):
        block = lax.axis_index("block")
        pl.run_scoped(lambda **buffers: body(block, *refs, **buffers), **scratch)

    return pl.kernel(
        scoped,
        out_type,
        mesh=mesh,
        name=name,
        cost_estimate=estimate,
        interpret=gpu_interpreter(),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )
