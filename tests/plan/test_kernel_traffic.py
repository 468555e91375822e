"""Bytes that kernels move, on kernels small enough to count by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from depthjax.plan.kernel_traffic import kernel_traffic

pytestmark = pytest.mark.jax_version

F32 = 4


def test_a_block_that_stays_is_fetched_once():
    """y = x * w in blocks of 32 rows, of which the last is a part: w stays."""

    def multiply(x, w, y):
        y[...] = x[...] * w[...]

    def run(x, w):
        rows = pl.BlockSpec((32, 128), lambda i: (i, 0))
        return pl.pallas_call(
            multiply,
            grid=(4,),
            in_specs=[rows, pl.BlockSpec((1, 128), lambda i: (0, 0))],
            out_specs=rows,
            out_shape=x,
            name="multiply",
        )(x, w)

    x, w = jax.ShapeDtypeStruct((100, 128), jnp.float32), jax.ShapeDtypeStruct((1, 128), "float32")
    (found,) = kernel_traffic(jax.jit(run), x, w)
    assert (found.name, found.steps, found.stated, found.uncounted) == ("multiply", 4, None, 0)
    assert found.reads == (100 + 1) * 128 * F32
    assert found.writes == 100 * 128 * F32
    assert found.blocks == (2 * 32 + 1 + 2 * 32) * 128 * F32


@pytest.mark.parametrize("count", [1, 3, 5])
def test_rows_behind_the_count_are_not_fetched(count):
    """The sum of the first `count` of 5 rows; a step behind them stays where it is."""

    def add(count, row, total):
        step = pl.program_id(0)

        @pl.when(step == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        @pl.when(step < count[0])
        def _():
            total[...] += row[0]

    def run(count, rows):
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(5,),
            in_specs=[pl.BlockSpec((1, 8, 128), lambda i, n: (jnp.minimum(i, n[0] - 1), 0, 0))],
            out_specs=pl.BlockSpec((8, 128), lambda i, n: (0, 0)),
        )
        cost = pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=7)
        result = jax.ShapeDtypeStruct((8, 128), jnp.float32)
        return pl.pallas_call(add, grid_spec=spec, out_shape=result, cost_estimate=cost)(
            count, rows
        )

    def with_count(rows):
        return jax.jit(run)(jnp.full((1,), count, jnp.int32), rows)

    (found,) = kernel_traffic(with_count, jax.ShapeDtypeStruct((5, 8, 128), jnp.float32))
    assert found.stated == 7
    assert found.reads == count * 8 * 128 * F32
    assert found.writes == 8 * 128 * F32
