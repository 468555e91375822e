"""JAX's splash attention for TPU, causal, forward and backward as two plain functions.

The backward kernels are called directly (private functions of
`jax.experimental.pallas.ops.tpu.splash_attention`, the same in JAX 0.10.2 and 0.12.0), since JAX's
own derivative knows no cotangent of the log-sum-exp.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from depthjax.kernels.over_mesh import over_rows_and_heads, platform

LANES = 128
FUSED_BLOCKS = 4
"""Most blocks of keys with which one kernel computes all three gradients: it writes one partial
gradient of the query for each, which is cheaper than a second kernel only while they are few."""


def fits(dtype: Any, length: int) -> bool:
    """Whether the kernels take sequences of this length and dtype: whole lanes of at most 32 bits;
    heads of any size."""
    return length % LANES == 0 and jnp.dtype(dtype).itemsize <= 4


def forward(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(mixed [B, T, H, E], log-sum-exp fp32 [B, T, H]) of query [B, T, H, E] and key, value
    [B, T, K, E]; by the interpreter on other platforms than TPU. Raises ValueError where the
    kernels do not fit."""
    if not fits(query.dtype, query.shape[1]):
        raise ValueError(
            f"splash attention was given {query.shape[1]} tokens of {query.dtype}: it takes a "
            f"multiple of {LANES}, of at most 32 bits"
        )

    def local(query, key, value):
        kernel = _kernel(query, save_residuals=True)
        scaled = query * query.shape[-1] ** -0.5
        mixed, (lse,) = jax.vmap(kernel)(*map(_heads_first, (scaled, key, value)))
        # The kernel writes it to all lanes; one of them is taken before anything else is done.
        mixed, lse = jax.lax.optimization_barrier((mixed, lse))
        return _heads_first(mixed), jnp.swapaxes(lse, 1, 2)

    return over_rows_and_heads(local, query.shape[0], key.shape[2])(query, key, value)


def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lse: jax.Array,
    by_mixed: jax.Array,
    shift: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The cotangents of query, key and value: dS = P * (dO V^T - shift), shift: [B, T, H]."""

    def local(query, key, value, lse, by_mixed, shift):
        scale = query.shape[-1] ** -0.5
        one = functools.partial(_backward_of_row, _kernel(query))
        arrays = map(_heads_first, (query * scale, key, value, by_mixed))
        rows = (jnp.swapaxes(x, 1, 2) for x in (lse, shift))
        by_query, by_key, by_value = map(_heads_first, jax.vmap(one)(*arrays, *rows))
        return by_query * scale, by_key, by_value

    run = over_rows_and_heads(local, query.shape[0], key.shape[2])
    return run(query, key, value, lse, by_mixed, shift)


def _heads_first(x):
    return jnp.swapaxes(x, 1, 2)


def _block_sizes(length, size):
    minor = {}
    block = next(n for n in (1024, 512, 256, LANES) if length % n == 0)
    fused = length // block <= FUSED_BLOCKS
    names = ["block_q", "block_kv", "block_q_dkv", "block_kv_dkv"]
    names += [] if fused else ["block_q_dq", "block_kv_dq"]
    if size % LANES:  # lanes along the sequence, or heads would be padded to whole ones in memory
        minor = dict.fromkeys(("k_layout", "v_layout"), library.QKVLayout.SEQ_MINOR)
    return library.BlockSizes(**dict.fromkeys(names, block), **minor, use_fused_bwd_kernel=fused)


def _kernel(query, **options):
    """Of local queries [B, T, H, E]."""
    _, length, heads, size = query.shape
    causal = masks.CausalMask((length, length))
    return library.make_splash_mha(
        masks.MultiHeadMask([causal] * heads),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=_block_sizes(length, size),
        interpret=platform() != "tpu",
        **options,
    )


def _backward_of_row(kernel, query, key, value, by_mixed, lse, shift):
    """[H, T, E], [K, T, E] and [H, T]; `query` scaled."""
    blocks = kernel.kwargs["block_sizes"]
    names = "is_mqa", "mask_value", "attn_logits_soft_cap", "mask_function", "interpret"
    shared = {name: kernel.kwargs[name] for name in names}
    shared |= {name: getattr(blocks, name) for name in ("q_layout", "k_layout", "v_layout")}
    arrays = query, key, value, None, None, lse, by_mixed, shift
    by_query, by_key, by_value = library._splash_attention_bwd_dkv(
        *arrays,
        bq=blocks.block_q_dkv,
        bkv=blocks.block_kv_dkv,
        bkv_compute=blocks.block_kv_dkv_compute,
        mask_info=kernel.dkv_mask_info,
        use_fused_bwd_kernel=blocks.use_fused_bwd_kernel,
        **shared,
    )
    if not blocks.use_fused_bwd_kernel:
        by_query = library._splash_attention_bwd_dq(
            *arrays,
            bq=blocks.block_q_dq,
            bkv=blocks.block_kv_dq,
            mask_info=kernel.dq_mask_info,
            **shared,
        )
    return by_query, by_key, by_value
