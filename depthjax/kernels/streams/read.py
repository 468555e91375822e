"""The read of Hyper-Connections: streams become a branch input and mixed streams.

Streams lie along the leading axis and tokens come last in all small arrays: on a TPU an axis of 4
at the end would be padded to whole tiles.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from depthjax.kernels.arguments import check_array, check_given, check_shapes
from depthjax.kernels.choice import Implementation, choose
from depthjax.kernels.over_mesh import frees_axes
from depthjax.kernels.streams import mosaic_gpu, mosaic_tpu, xla

Weigh = Callable[[Any, jax.Array | None, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
_FORMS = {"xla": xla, "mosaic_tpu": mosaic_tpu, "mosaic_gpu": mosaic_gpu}


@frees_axes("streams", (0, True), (1, True), (1, False))
def read_streams(
    weigh: Weigh,
    eps: float,
    gates: Any,
    columns: jax.Array | None,
    scale: jax.Array,
    streams: jax.Array,
    *,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(rms_norm(sum_j read_j H_j) [..., D], sum_j transport_tj H_j [m, ..., D], write) of streams H
    [m, ..., D], the first two in their dtype, rounded once.

    weigh(gates, *stream_products(H, columns)) gives read [m, ...], write and transport [m, m, ...]
    in at least fp32. It does with each token the same, sees every gate with the axes of the tokens
    behind its own (`beside`), and is spelled in moves along leading axes and element by element,
    with `repeat` for its loops: so a kernel can run it, and differentiate it, on tokens that fill
    whole registers.

    The backward pass (one, in reverse) keeps the streams as they are and a few numbers a token, and
    computes the rest again. On a TPU (`implementation`, see `kernels.choice`) each direction is one
    kernel, which reads and writes every stream once. On a GPU (from Hopper on, 2 to 32 streams of
    bfloat16 or fp32, of a width that is a multiple of 128 up to 7168, in fp32 5760) streams are
    read before their weights are known, and again for what they weigh. Raises ValueError for a form
    that does not take the arguments, and where they do not go together.
    """
    check_array("streams", streams, "[m, ..., D]")
    check_given(scale=scale)
    m, *_, width = streams.shape
    wanted = (width, "c") if np.ndim(columns) == 2 else (m, width, "c")
    check_shapes("streams", streams, columns=(columns, wanted), scale=(scale, (width,)))
    fits = {name: form.fits(streams, columns) for name, form in _FORMS.items() if form is not xla}
    form = choose(implementation, tpu=fits["mosaic_tpu"], gpu=fits["mosaic_gpu"])
    if not fits.get(form, True):
        like = jax.typeof(streams)
        raise ValueError(f"streams like {like} have no {form} form: give 'xla' or None")
    return _read(weigh, eps, form, gates, columns, scale, streams)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _read(weigh, eps, form, gates, columns, scale, streams):
    return _forward(weigh, eps, form, gates, columns, scale, streams)[0]


def _forward(weigh, eps, form, gates, columns, scale, streams):
    results, small = _FORMS[form].forward(weigh, eps, gates, columns, scale, streams)
    return results, (gates, columns, scale, streams, small)


def _backward(weigh, eps, form, kept, cotangents):
    run = _FORMS[form].backward
    by_gates, by_columns, by_scale, by_streams = run(weigh, eps, *kept, *cotangents)
    gates, columns, scale, streams, _ = kept
    like = (gates, columns, scale, streams)
    results = (by_gates, by_columns, by_scale, by_streams)
    return jax.tree.map(lambda a, b: a.astype(jnp.result_type(b)), results, like)


_read.defvjp(_forward, _backward)
