"""The Mosaic kernels on arrays of any number of token axes, each device on its own rows of a batch.

form: "mosaic_tpu" or "mosaic_gpu", whose kernels take the same arguments.
"""

import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from depthjax.kernels import mosaic_gpu
from depthjax.kernels.choice import Implementation, choose
from depthjax.kernels.mixture import mosaic_tpu, mosaic_tpu_backward, mosaic_tpu_gather, tiles
from depthjax.kernels.mixture.rule import PLAIN
from depthjax.kernels.over_mesh import over_tokens


class Cotangents(NamedTuple):
    """d_rows [N, ..., D], d_newest [..., D] or None, du fp32 [D], d_scale fp32 [D] or None."""

    rows: jax.Array
    newest: jax.Array | None
    direction: jax.Array
    scale: jax.Array | None


def form_of(
    implementation: Implementation, *arrays: jax.Array | None, tpu: bool = True, gpu: bool = True
) -> str:
    """The form that runs on these sources [..., D]: one dtype, bfloat16 or float32, of some tokens
    for both Mosaic forms, for a GPU's a width that `mosaic_gpu.fits`. tpu, gpu: whether they take
    the rest. Raises ValueError where one is named and does not take the sources."""
    same, width = tiles.fits(*arrays) and arrays[0].size > 0, arrays[0].shape[-1]
    on_gpu = same and mosaic_gpu.fits(width, arrays[0].dtype)
    form = choose(implementation, tpu=tpu and same, gpu=gpu and on_gpu)
    if (form == "mosaic_gpu" and not on_gpu) or (form == "mosaic_tpu" and not same):
        dtypes = " and ".join(sorted({str(x.dtype) for x in arrays if x is not None}))
        widths = (
            f", of a width that is a multiple of {mosaic_gpu.LANES} up to 7168, in fp32 5760"
            if form == "mosaic_gpu"
            else ""
        )
        raise ValueError(
            f"sources are {dtypes} of shape {arrays[0].shape}: implementation={form!r} takes "
            f"bfloat16 or float32, all the same, of some tokens{widths}; give None or 'xla'"
        )
    return form


def _kernels(form: str) -> types.SimpleNamespace:
    """mix, mix_backward and gather of flat arrays: rows [N, T, D] and newest [T, D]."""
    if form == "mosaic_gpu":
        from depthjax.kernels.mosaic_gpu import gather, mixture  # late: they take a while to import

        return types.SimpleNamespace(
            mix=mixture.mix, mix_backward=mixture.mix_backward, gather=gather.gather
        )
    return types.SimpleNamespace(
        mix=mosaic_tpu.mix,
        mix_backward=mosaic_tpu_backward.mix_backward,
        gather=mosaic_tpu_gather.gather,
    )


def mix(form, rows, count, newest, direction, eps, scale=None, dtype=jnp.float32, rule=PLAIN):
    """(mixture [..., D] of `dtype`, log-sum-exp [...]) of rows [N, ..., D] and newest [..., D]."""
    shape = rows.shape[1:]

    def local(axes, rows, newest, *others):
        out, lse = _mix(_flat(rows, 1), _flat(newest, 0), *others)
        return out.reshape(*rows.shape[1:]), lse.reshape(rows.shape[1:-1])

    def _mix(rows, newest, direction, eps, scale, count=count):
        options = () if rule == PLAIN else (rule,)
        return _kernels(form).mix(rows, count, newest, direction, eps, scale, dtype, *options)

    given = (*_with_batch(rows, newest), direction, jnp.asarray(eps), scale)
    axes, (given, count_axis) = (1, 0, None, None, None), _and_count(given, count)
    run = over_tokens(local, given[0], (*axes, *count_axis), (0, 0))
    out, lse = run(*given)
    return out.reshape(shape), lse.reshape(shape[:-1])


def mix_backward(
    form, rows, count, newest, direction, eps, scale, cotangent, d_rows, d_newest, rule=PLAIN
) -> Cotangents:
    """Those of `mix` from that of the mixture [..., D]; d_rows [N, ..., D]: what is added to, in
    place, in the live rows, or None: then the others of the result hold anything; d_newest [...,
    D]: what the newest source's is added to, or None."""
    shape = rows.shape

    def local(axes, rows, newest, cotangent, d_rows, d_newest, direction, eps, scale, count=count):
        flat = _flat(rows, 1), count, _flat(newest, 0), direction, eps, scale
        options = () if rule == PLAIN else (rule,)
        run = _kernels(form).mix_backward
        added_to = _flat(d_rows, 1), _flat(d_newest, 0)
        found = Cotangents(*run(*flat, _flat(cotangent, 0), *added_to, *options))
        sums = tuple(_sum_over(axes, x) for x in (found.direction, found.scale))
        own = None if newest is None else found.newest.reshape(newest.shape)
        return Cotangents(found.rows.reshape(rows.shape), own, *sums)

    arrays = [*_with_batch(rows, newest), *reversed(_with_batch(d_rows, cotangent))]
    arrays.append(_with_batch(None, d_newest)[1])
    given, count_axis = _and_count((*arrays, direction, jnp.asarray(eps), scale), count)
    in_axes, out_axes = (1, 0, 0, 1, 0, *[None] * 3, *count_axis), Cotangents(1, 0, None, None)
    found = over_tokens(local, given[0], in_axes, out_axes)(*given)
    own = None if newest is None else found.newest.reshape(newest.shape)
    return found._replace(rows=found.rows.reshape(shape), newest=own)


def gather(form, rows, index, last, directions, lse, delta, eps, dtype):
    """(dv [..., D] of `dtype`, du fp32 [N, D]); see `gather_rows`."""
    shape, n = rows.shape, rows.shape[0]
    rows, last = _with_batch(rows, last)
    batch = rows.shape[1]
    lse, delta = (x.reshape(n, batch, -1) for x in (lse, delta))

    def local(axes, rows, index, last, directions, lse, delta, eps):
        by_reader = lse.reshape(n, -1), delta.reshape(n, -1)
        arrays = _flat(rows, 1), index, _flat(last, 0), directions, *by_reader
        dv, du = _kernels(form).gather(*arrays, eps, dtype)
        return dv.reshape(last.shape), _sum_over(axes, du)

    in_axes = (1, None, 0, None, 1, 1, None)
    run = over_tokens(local, rows, in_axes, (0, None))
    scalars = jnp.asarray(index, jnp.int32), jnp.asarray(eps)
    dv, du = run(rows, scalars[0], last, directions, lse, delta, scalars[1])
    return dv.reshape(shape[1:]), du


def _with_batch(rows: jax.Array | None, newest: jax.Array | None) -> tuple[Any, Any]:
    """With an axis of one token where there is none."""
    rows = rows[:, None] if rows is not None and rows.ndim == 2 else rows
    return rows, newest[None] if newest is not None and newest.ndim == 1 else newest


def _and_count(given: tuple, count) -> tuple[tuple, tuple]:
    """The arguments with a traced count as the last, and the axis that it has."""
    return (given, ()) if isinstance(count, int) else ((*given, count), (None,))


def _flat(x: jax.Array | None, axis: int) -> jax.Array | None:
    """The axes from `axis` to the last but one as one."""
    return None if x is None else x.reshape(*x.shape[:axis], -1, x.shape[-1])


def _sum_over(axes: tuple[str, ...], x: jax.Array | None) -> jax.Array | None:
    return jax.lax.psum(x, axes) if axes and x is not None else x
