"""Both phases behind one function each, with their backward passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from depthjax.kernels import mosaic_gpu
from depthjax.kernels.arguments import check_array, check_given, check_number, check_shapes
from depthjax.kernels.choice import Implementation, choose
from depthjax.kernels.over_mesh import frees_axes, over_batch, tokens_of
from depthjax.kernels.rms_norm import at_least_float32
from depthjax.kernels.two_phase import xla
from depthjax.kernels.two_phase.tiles import block_tokens


@frees_axes("blocks", (1, True), (1, False))
def phase1(
    blocks: jax.Array,
    queries: jax.Array,
    key_scale: jax.Array | None = None,
    *,
    count: jax.Array | int | None = None,
    eps: float | jax.Array = 1e-6,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """(mixtures [S, ..., D] in the dtype of the blocks, log-sum-exp [S, ...] in at least fp32) of
    S queries over the same sources; equations in the package's docstring.

    blocks: [N, ..., D]; queries: [S, D]; key_scale: [D], [S, D] or None for ones; count: rows
    0..count-1 are live (None: all), the others may hold anything. Without a live row a mixture is
    0 and its log-sum-exp -inf, which phase 2 takes as "the open sum alone".

    Moves N + S rows of tokens x D in its Mosaic forms (on a GPU 2 N + S where S D is above 8192),
    of which dead rows are not fetched (of up to 16 rows); on a TPU, a token that is not finite
    spoils up to 15 neighbours. The mixtures' error is one rounding to their dtype, on a TPU for
    bfloat16 and S > 8 plus 2^-9 of the largest source. The backward pass keeps the log-sum-exp and
    the arguments. Raises ValueError where arguments do not go together, or with a form.
    """
    check_array("blocks", blocks, "[N, ..., D]")
    check_array("queries", queries, "[S, D]")
    width = blocks.shape[-1]
    scales = queries.shape if np.ndim(key_scale) == 2 else (width,)
    check_shapes("blocks", blocks, queries=(queries, ("S", width)), key_scale=(key_scale, scales))
    check_number("count", count, 0, len(blocks), "how many blocks are live")
    form = _form_of_phase1(implementation, blocks, queries.shape[0], len(blocks))
    return _phase1(form, blocks, _directions(queries, key_scale), count, eps)


def phase1_backward(
    blocks: jax.Array,
    directions: jax.Array,
    lse: jax.Array,
    by_mixtures: jax.Array,
    by_lse: jax.Array,
    *,
    count: jax.Array | int | None = None,
    eps: float | jax.Array = 1e-6,
    into: jax.Array | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """(cotangent of the blocks [N, ..., D], of the directions [S, D]) from the cotangents of the
    mixtures [S, ..., D] and of the log-sum-exp [S, ...].

    directions: queries times key scale, in at least fp32. With p_si the weights and n_i = rho_i v_i

        g_si = p_si (dO_s . v_i - sum_j p_sj dO_s . v_j + dlse_s)
        dv_i = sum_s p_si dO_s + rho_i (sum_s g_si u_s - n_i sum_s g_si e_si / D)
        du_s = sum over tokens and i of g_si n_i

    into: [N, ..., D], a cotangent that this one is added to in fp32, in place where the form can.
    """
    rows = len(blocks) * (1 if into is None else 2)
    form = _form_of_phase1(implementation, blocks, directions.shape[0], rows)
    run = xla.backward1 if form == "xla" else functools.partial(_mosaic_backward1, form)
    return run(blocks, directions, lse, by_mixtures, by_lse, count, eps, into)


@frees_axes("open_sum", (0, True), (0, True), lead=0)
def phase2(
    mixture: jax.Array,
    lse: jax.Array,
    open_sum: jax.Array,
    branch: jax.Array | None = None,
    *,
    query: jax.Array,
    key_scale: jax.Array | None = None,
    norm_scale: jax.Array,
    fresh: jax.Array | bool | None = None,
    place: jax.Array | int | None = None,
    eps: float | jax.Array = 1e-6,
    norm_eps: float | jax.Array = 1e-6,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """(x [..., D], the new open sum p [..., D]) of one sublayer; equations in the package's
    docstring.

    mixture: [..., D] and lse: [...], of phase 1; with `place`, all its [S, ..., D] and [S, ...], of
    which those at this (traced) place are taken. open_sum: [..., D]; branch: [..., D] is added to
    it, or, where the scalar `fresh` is true, replaces it (None: p is open_sum); query, key_scale
    (None: ones), norm_scale: [D]. p is rounded to the dtype of the open sum, and the rounded value
    is what is read; x has the dtype of the mixture, and is rounded once.

    A Mosaic form is one launch for any number of tokens, and moves 5 rows of tokens x D (4 where
    there is no branch, or a fresh one). The backward pass keeps the mixture, the lse and p.
    Raises ValueError where arguments do not go together, or with a form.
    """
    check_array("open_sum", open_sum, "[..., D]", axes=1)
    check_given(mixture=mixture, lse=lse, query=query, norm_scale=norm_scale)
    (*tokens, width), all_ = open_sum.shape, () if place is None else ("S",)
    vectors = {"query": query, "key_scale": key_scale, "norm_scale": norm_scale}
    shapes = {name: (vector, (width,)) for name, vector in vectors.items()}
    shapes["mixture"] = mixture, (*all_, *tokens, width)
    shapes["lse"] = lse, (*np.shape(mixture)[: len(all_)], *tokens)
    shapes |= {"branch": (branch, open_sum.shape), "fresh": (fresh, ())}
    check_shapes("open_sum", open_sum, **shapes)
    if place is not None:
        check_number("place", place, 0, len(mixture) - 1, "which mixture is read")
    if branch is None and fresh is not None:
        raise ValueError("fresh says that a branch replaces the open sum, but there is no branch")
    if place is None:
        mixture, lse, place = mixture[None], lse[None], 0
    form = _form(implementation, True, mixture, open_sum, branch)
    direction = _directions(query, key_scale)
    scalars = eps, norm_eps
    small = direction, norm_scale, fresh, scalars
    return _phase2(form, mixture, lse, place, open_sum, branch, *small)


def _form_of_phase1(implementation, blocks, queries, rows):
    """rows: that the backward pass moves beside the sources and a row a query."""
    return _form(implementation, block_tokens(blocks, queries, rows) is not None, blocks)


def _form(implementation, fits_tpu, *arrays):
    """The form for arrays [..., D]; fits_tpu: whether a TPU has room for them."""
    dtypes, width = [x.dtype for x in arrays if x is not None], arrays[0].shape[-1]
    narrow = all(dtype in (jnp.bfloat16, jnp.float32) for dtype in dtypes) and arrays[0].size > 0
    fits = {"tpu": narrow and fits_tpu, "gpu": narrow and mosaic_gpu.fits(width, *dtypes)}
    form = choose(implementation, **fits)
    if form != "xla" and not fits[form.removeprefix("mosaic_")]:
        raise ValueError(
            f"arguments like {jax.typeof(arrays[0])} have no {form} form: it takes bfloat16 and "
            "float32, some tokens, on a TPU as many sources of a width as fit there, on a GPU "
            f"widths that are multiples of {mosaic_gpu.LANES} up to 7168, in fp32 5760; give 'xla' "
            "or None"
        )
    return form


def _kernels(form):
    """(both phases forward, the first one and the second one backward) of flat arrays [..., T, D]:
    they take the same arguments on all platforms."""
    if form == "mosaic_gpu":  # late: they take a while to import
        from depthjax.kernels.mosaic_gpu import queries, queries_backward, two_phase

        forward = queries.phase_one, two_phase.merge
        return *forward, queries_backward.phase_one_backward, two_phase.merge_backward
    from depthjax.kernels.two_phase import phase1_tpu, phase2_tpu

    return phase1_tpu.forward, phase2_tpu.forward, phase1_tpu.backward, phase2_tpu.backward


def _directions(query, key_scale):
    query = at_least_float32(query)
    return query if key_scale is None else query * at_least_float32(key_scale)


# Phase 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _phase1(form, blocks, directions, count, eps):
    return _forward1(form, blocks, directions, count, eps)[0]


def _forward1(form, blocks, directions, count, eps):
    run = xla.forward1 if form == "xla" else functools.partial(_mosaic_forward1, form)
    mixtures, lse = run(blocks, directions, count, eps)
    return (mixtures, lse), (blocks, directions, lse, count, eps)


def _backward1(form, kept, cotangents):
    blocks, directions, lse, count, eps = kept
    options = {"count": count, "eps": eps, "implementation": form}
    by_blocks, by_directions = phase1_backward(blocks, directions, lse, *cotangents, **options)
    return by_blocks, by_directions.astype(directions.dtype), None, None


_phase1.defvjp(_forward1, _backward1)


def _mosaic_forward1(form, blocks, directions, count, eps):
    forward, *_ = _kernels(form)

    def local(_, blocks, directions, count, eps):
        mixtures, lse = forward(_flat(blocks, 1), directions, count, eps)
        shape = (len(directions), *blocks.shape[1:])
        return mixtures.reshape(shape), lse.reshape(shape[:-1])

    run = _over_tokens(local, blocks, 1, (1, None, None, None), (1, 1))
    return run(blocks, directions, count, eps)


def _mosaic_backward1(form, blocks, directions, lse, by_mixtures, by_lse, count, eps, into):
    _, _, backward, _ = _kernels(form)

    def local(axes, blocks, lse, by_mixtures, by_lse, into, directions, count, eps):
        tokens = [None if x is None else _flat(x, 1) for x in (blocks, by_mixtures, into)]
        small = [x.reshape(len(x), -1) for x in (lse, by_lse)]
        by_blocks, by_directions = backward(*tokens, *small, directions, count, eps)
        return by_blocks.reshape(blocks.shape), jax.lax.psum(by_directions, axes)

    in_axes = (1, 1, 1, 1, 1, None, None, None)
    run = _over_tokens(local, blocks, 1, in_axes, (1, None))
    return run(blocks, lse, by_mixtures, by_lse, into, directions, count, eps)


# Phase 2


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _phase2(form, mixtures, lses, place, open_sum, branch, direction, norm_scale, fresh, scalars):
    arguments = mixtures, lses, place, open_sum, branch, direction, norm_scale, fresh, scalars
    return _forward2(form, *arguments)[0]


def _forward2(form, mixtures, lses, place, open_sum, branch, *small):
    if form == "xla":
        x, p = xla.forward2(mixtures[place], lses[place], open_sum, branch, *small)
    else:
        x, p = _mosaic_forward2(form, mixtures, lses[place], place, open_sum, branch, *small)
    like = None if branch is None else jnp.zeros((0,), branch.dtype)
    return (x, p), (mixtures, lses, place, p, *small, like)


def _backward2(form, kept, cotangents):
    mixtures, lses, place, p, direction, norm_scale, fresh, scalars, like = kept
    run = xla.backward2 if form == "xla" else functools.partial(_mosaic_backward2, form)
    by_x, by_p = cotangents
    grads = run(mixtures[place], lses[place], p, by_x, by_p, direction, norm_scale, scalars)
    by_mixture, by_lse, by_p, by_direction, by_scale = grads
    by_branch = None if like is None else by_p.astype(like.dtype)
    by_open = by_p if fresh is None else jnp.where(fresh, 0, by_p)
    by_direction = by_direction.astype(direction.dtype)
    by_scale = by_scale.astype(norm_scale.dtype)
    by_mixtures, by_lses = (
        jnp.zeros_like(all_).at[place].set(one)
        for all_, one in ((mixtures, by_mixture), (lses, by_lse))
    )
    by_tokens = by_mixtures, by_lses, None, by_open, by_branch
    return *by_tokens, by_direction, by_scale, None, None


_phase2.defvjp(_forward2, _backward2)


def _mosaic_forward2(form, mixtures, lse, place, open_sum, branch, *small):
    _, forward, *_ = _kernels(form)

    def local(_, mixtures, lse, open_sum, branch, place, *small):
        tokens = [None if x is None else _flat(x, 0) for x in (open_sum, branch)]
        x, p = forward(_flat(mixtures, 1), place, *tokens, lse.reshape(-1), *small)
        return x.reshape(open_sum.shape), p.reshape(open_sum.shape)

    in_axes = (1, 0, 0, 0, None, None, None, None, None)
    run = _over_tokens(local, open_sum, 0, in_axes, (0, 0))
    return run(mixtures, lse, open_sum, branch, place, *small)


def _mosaic_backward2(form, mixture, lse, p, by_x, by_p, direction, norm_scale, scalars):
    *_, backward = _kernels(form)

    def local(axes, mixture, lse, *rest):
        tokens, small = (mixture, *rest[:3]), rest[3:]
        flat = [_flat(x, 0) for x in tokens]
        by_mixture, by_p, by_lse, *sums = backward(*flat, lse.reshape(-1), *small)
        by_tokens = [x.reshape(mixture.shape) for x in (by_mixture, by_p)]
        return *by_tokens, by_lse.reshape(lse.shape), *jax.lax.psum(sums, axes)

    in_axes, out_axes = (0, 0, 0, 0, 0, None, None, None), (0, 0, 0, None, None)
    run = _over_tokens(local, mixture, 0, in_axes, out_axes)
    arguments = mixture, lse, p, by_x, by_p, direction, norm_scale, scalars
    by_mixture, by_p, by_lse, by_direction, by_scale = run(*arguments)
    return by_mixture, by_lse, by_p, by_direction, by_scale


def _over_tokens(local, tokens, axis, in_axes, out_axes):
    """`over_batch` for arrays like `tokens`, whose batch is the given axis unless that is the
    width."""
    batch, length = tokens_of(tokens, axis)
    return over_batch(local, batch, in_axes, out_axes, length=length, kernel=True)


def _flat(x, lead):
    """[lead axes, ..., D] -> [lead axes, T, D]."""
    return x.reshape(*x.shape[:lead], -1, x.shape[-1])
