"""Numbers in fp32 as sums of numbers in bfloat16, for products that are exact on a matrix unit."""

import jax
import jax.numpy as jnp


def bf16_terms(x: jax.Array, terms: int = 3) -> list[jax.Array]:
    """Terms of bfloat16, each the first bits of what the ones before leave, whose sum is x [...] in
    fp32: to 16 bits with two, exactly with three. By bits: casts there and back might be optimised
    away."""
    result = []
    for _ in range(terms - 1):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        first = jax.lax.bitcast_convert_type(bits, jnp.float32)
        result.append(first.astype(jnp.bfloat16))
        x = x - first
    return [*result, x.astype(jnp.bfloat16)]
