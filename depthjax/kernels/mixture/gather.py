"""The backward pass of Full Attention Residuals from one buffer: each source gathers its cotangent.

Reader j mixes sources 0..j of a stack (see `depth_read` for the equations). Going backward, source
i is complete once all its readers j >= i are, and then its row is needed no more: the cotangent
c of the reader that follows it takes its place. So one buffer of 2 L + 1 rows serves both passes.
With a_ji the weight of source i in reader j, kept as a log-sum-exp, and delta_j = c_j . z_j,

    g_ji = a_ji (c_j . v_i - delta_j)
    dv_i = sum_j a_ji c_j + rho_i (sum_j g_ji u_j - n_i sum_j g_ji e_ji / D)
    du_j = sum over tokens and i of g_ji n_i

The XLA forms read to the end of the smallest of a few static sizes that holds all live rows: XLA
fuses no loop over a traced number of rows. The Mosaic kernels read the live rows alone, each once;
on a GPU the products with the directions, [T, D] with [D, N], are XLA's.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from depthjax.kernels.arguments import check_array, check_given, check_number, check_shapes
from depthjax.kernels.choice import Implementation
from depthjax.kernels.mixture import mosaic_tpu_gather, sharded
from depthjax.kernels.mixture.read import live_rows, score
from depthjax.kernels.over_mesh import frees_axes
from depthjax.kernels.rms_norm import at_least_float32

SIZES = 2
"""Most static sizes of a read. More of them read fewer dead rows, and take longer to compile."""


def prefixes(rows: int) -> list[int]:
    """The static sizes of the reads of a buffer with so many rows, the last one all of them; none
    smaller than 4 rows."""
    parts = max(1, min(SIZES, rows // 4))
    return [-(-rows * part // parts) for part in range(1, parts + 1)]


def over_prefix(rows: int, count: jax.Array, make: Callable[[int], Callable], *operands: Any):
    """make(n)(*operands) for the smallest prefix size n that holds `count` of the `rows`."""
    sizes = prefixes(rows)
    if len(sizes) == 1:
        return make(rows)(*operands)
    index = jnp.searchsorted(jnp.asarray(sizes[:-1]), count)
    return jax.lax.switch(index, [make(size) for size in sizes], *operands)


@frees_axes("rows", (0, True), (0, False))
def mix_rows(
    rows: jax.Array,
    count: jax.Array | int,
    direction: jax.Array,
    eps: jax.Array | float,
    *,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """(mixture [..., D], log-sum-exp [...]), in at least fp32, of the first `count` of rows
    [N, ..., D] under direction [D]. Has no gradient of its own. Raises ValueError where arguments
    do not go together."""
    check_array("rows", rows, "[N, ..., D]")
    check_given(direction=direction)
    check_shapes("rows", rows, direction=(direction, rows.shape[-1:]))
    check_number("count", count, 1, len(rows), "how many rows are live")
    form = sharded.form_of(implementation, rows)
    if form != "xla":
        return sharded.mix(form, rows, count, None, direction, eps)

    def make(size):
        def mix(rows):
            v, live = live_rows(rows, size, count)
            logits = jnp.where(live[..., 0], score(v, direction, eps)[0], -jnp.inf)
            lse = jax.nn.logsumexp(logits, axis=0)
            return jnp.sum(jnp.exp(logits - lse)[..., None] * v, axis=0), lse

        return mix

    return over_prefix(rows.shape[0], count, make, rows)


@frees_axes("rows", (0, True), None)
def gather_rows(
    rows: jax.Array,
    index: jax.Array | int,
    last: jax.Array,
    directions: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    eps: jax.Array | float,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """(dv [..., D] of `dtype`, du [N, D]) of source `index`; du: its share in those of all readers.

    rows: [N, ..., D], the sources 0..index, and behind them in row j + 1 the cotangent of reader
    j's mixture, for j = index..N-2; last: [..., D], that of the last reader, N - 1. directions:
    [N, D]; lse, delta: [N, ...], of the readers; entries of readers before `index` are not used.
    dtype None: as the sums are, in at least fp32. Raises ValueError where arguments do not go
    together.
    """
    check_array("rows", rows, "[N, ..., D]")
    check_given(last=last, directions=directions, lse=lse, delta=delta)
    (readers, *tokens, width), numbers = rows.shape, rows.shape[:-1]
    shapes = {"last": (last, (*tokens, width)), "directions": (directions, (readers, width))}
    check_shapes("rows", rows, **shapes, lse=(lse, numbers), delta=(delta, numbers))
    check_number("index", index, 0, readers - 1, "which row gathers")
    form = sharded.form_of(implementation, rows, last, tpu=mosaic_tpu_gather.fits(rows))
    if form != "xla":
        dtype = jnp.float32 if dtype is None else dtype
        return sharded.gather(form, rows, index, last, directions, lse, delta, eps, dtype)
    dv, du = _gather(rows, index, last, directions, lse, delta, eps)
    return dv if dtype is None else dv.astype(dtype), du


def _gather(rows, index, last, directions, lse, delta, eps):
    readers, width = rows.shape[0], rows.shape[-1]
    v = at_least_float32(jax.lax.dynamic_index_in_dim(rows, index, 0, keepdims=False))
    rho = jax.lax.rsqrt(jnp.mean(v * v, axis=-1) + eps)
    # fp32 products: the matrix unit would round both sides to bf16, and exp would amplify that.
    e = jnp.einsum("...d,jd->j...", v, directions, precision="highest") * rho
    reads = (jnp.arange(readers) >= index).reshape(-1, *[1] * rho.ndim)
    a = jnp.where(reads, jnp.exp(jnp.where(reads, e - lse, 0)), 0)

    def make(size):
        def gather(rows):
            c, a_stored = at_least_float32(rows[readers - size :]), a[readers - 1 - size : -1]
            dots = jnp.sum(c * v, axis=-1)
            dots = jnp.pad(dots, [(readers - 1 - size, 0)] + [(0, 0)] * (dots.ndim - 1))
            return jnp.sum(a_stored[..., None] * c, axis=0), dots

        return gather

    dv, dots = over_prefix(readers - 1, readers - 1 - index, make, rows)
    last = at_least_float32(last)
    dots = jnp.concatenate([dots, jnp.sum(last * v, axis=-1)[None]])
    g = jnp.where(reads, a * (dots - delta), 0)
    along = jnp.einsum("j...,jd->...d", g, directions, precision="highest")
    radial = (rho * jnp.sum(g * e, axis=0) / width)[..., None] * v
    dv = dv + a[-1][..., None] * last + rho[..., None] * (along - radial)
    return dv, jnp.einsum("j...,...d->jd", g * rho, v, precision="highest")
