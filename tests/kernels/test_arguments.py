"""Arguments that do not go together are refused in one sentence, whatever form would run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from depthjax.kernels import (
    depth_mix,
    depth_read,
    depth_weights,
    gather_rows,
    mix_rows,
    phase1,
    phase2,
    read_streams,
)

ROWS, TOKENS, VECTOR = jnp.zeros((4, 2, 3, 8)), jnp.zeros((2, 3, 8)), jnp.zeros(8)
NUMBERS, QUERIES = jnp.zeros((2, 3)), jnp.zeros((3, 8))


def never(gates, products, squares):
    raise AssertionError("weights are asked for before the arguments are looked at")


def merge(*, mixture=TOKENS, lse=NUMBERS, open_sum=TOKENS, branch=TOKENS, **options):
    options = {"query": VECTOR, "norm_scale": VECTOR, **options}
    return functools.partial(phase2, mixture, lse, open_sum, branch, **options)


def mix(sources=ROWS, query=VECTOR, **options):
    return functools.partial(depth_mix, sources, query, **options)


def queries(blocks=ROWS, queries=QUERIES, *rest, **options):
    return functools.partial(phase1, blocks, queries, *rest, **options)


def streams(streams=ROWS, columns=None, scale=VECTOR):
    return functools.partial(read_streams, never, 1e-6, (), columns, scale, streams)


def gather(index=1, directions=ROWS[:, 0, 0], numbers=ROWS[..., 0]):
    arrays = ROWS, index, TOKENS, directions, numbers, numbers
    return functools.partial(gather_rows, *arrays, 1e-6)


def read(newest=TOKENS, direction=VECTOR, count=1):
    return functools.partial(depth_read, ROWS, newest, direction, count, 1e-6)


WRONG = {
    "sources is int32: give an array [N, ..., D] of floating": mix(jnp.zeros((2, 8), jnp.int32)),
    "sources has shape (4, 0): give [N, ..., D] with N and D at least 1": mix(jnp.zeros((4, 0))),
    "sources have shapes []: give at least one": mix([]),
    "sources have shapes [(2,), (3,)]: give": mix([jnp.zeros(2), jnp.zeros(3)]),
    "count is 5: give how many sources are live, 1 to 4": mix(count=5),
    "count is 0: give how many sources are live, 1 to 4": mix(count=0),
    "count is 2.0: give how many sources are live, one integer": mix(count=2.0),
    "count is float32[]: give how many": mix(count=jnp.float32(2)),
    "count is int32[2]: give how many": mix(count=jnp.arange(2)),
    "count is -1: give how many sources are live, 0 to 4": mix(newest=TOKENS, count=-1),
    "keep is 0: give how many logits stay, at least 1": mix(keep=0),
    "output_scale is float: give an array (8,)": mix(output_scale=2.0),
    "queries has shape (3, 9), but blocks of shape (4, 2, 3, 8) need (S, 8)": queries(
        ROWS, jnp.zeros((3, 9))
    ),
    "queries has shape (8,): give [S, D]": queries(ROWS, VECTOR),
    "key_scale has shape (2, 8), but blocks of": queries(ROWS, QUERIES, ROWS[0, :, 0]),
    "blocks has shape (8,): give [N, ..., D]": queries(VECTOR),
    "count is 5: give how many blocks are live, 0 to 4": queries(count=5),
    "lse has shape (3, 2), but open_sum of shape (2, 3, 8) needs (2, 3)": merge(lse=NUMBERS.T),
    "branch has shape (2, 3, 9), but": merge(branch=jnp.zeros((2, 3, 9))),
    "mixture has shape (4, 2, 3, 8), but open_sum of": merge(mixture=ROWS, lse=ROWS[..., 0]),
    "mixture has shape (2, 3, 8), but open_sum of shape (2, 3, 8) needs (S, 2, 3, 8)": merge(
        place=0
    ),
    "lse is None: give an array": merge(lse=None),
    "place is 4: give which mixture is read, 0 to 3": merge(
        mixture=ROWS, lse=ROWS[..., 0], place=4
    ),
    "norm_scale has shape (9,), but open_sum of": merge(norm_scale=jnp.zeros(9)),
    "query has shape (1,), but open_sum of": merge(query=jnp.zeros(1)),
    "fresh has shape (2,), but open_sum of": merge(fresh=jnp.zeros(2, bool)),
    "streams has shape (8,): give [m, ..., D]": streams(VECTOR),
    "scale is None: give an array": streams(scale=None),
    "scale has shape (1,), but streams of": streams(scale=jnp.zeros(1)),
    "columns has shape (9, 3), but streams of shape (4, 2, 3, 8) need (8, c)": streams(
        columns=jnp.zeros((9, 3))
    ),
    "columns has shape (3, 8, 3), but streams of shape (4, 2, 3, 8) need (4, 8, c)": streams(
        columns=jnp.zeros((3, 8, 3))
    ),
    "newest has shape (8,), but history of shape (4, 2, 3, 8) needs (2, 3, 8)": read(VECTOR),
    "newest is None: give an array": read(None),
    "direction has shape (1,), but history of": read(direction=jnp.zeros(1)),
    "count is 5: give how many rows are live, 0 to 4": read(count=5),
    "directions has shape (3, 8), but rows of": gather(directions=QUERIES),
    "lse has shape (2, 3), but rows of shape (4, 2, 3, 8) need (4, 2, 3)": gather(numbers=NUMBERS),
    "index is 4: give which row gathers, 0 to 3": gather(4),
    "direction has shape (9,), but rows of": functools.partial(
        mix_rows, ROWS, 2, jnp.zeros(9), 1e-6
    ),
    "count is 0: give how many rows are live, 1 to 4": functools.partial(
        mix_rows, ROWS, 0, VECTOR, 1e-6
    ),
}


@pytest.mark.parametrize("form", [None, "xla", "mosaic_tpu", "mosaic_gpu"])
@pytest.mark.parametrize("sentence", WRONG)
def test_refused(sentence, form):
    with pytest.raises(ValueError) as raised:
        WRONG[sentence](implementation=form)
    assert str(raised.value).startswith(sentence)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("form", ["mosaic_tpu", "mosaic_gpu"])
def test_sources_of_two_dtypes(form):
    newest = TOKENS.astype(jnp.bfloat16)
    with pytest.raises(
        ValueError, match=r"^sources are bfloat16 and float32 of shape \(4, 2, 3, 8"
    ):
        depth_mix(ROWS, VECTOR, newest=newest, implementation=form)


def test_weights_of_a_list():
    rows = jax.random.normal(jax.random.key(0), ROWS.shape)
    expected = depth_weights(rows, VECTOR + 1)
    np.testing.assert_array_equal(depth_weights(list(rows), VECTOR + 1), expected)


def test_weights_of_sources_that_there_are_not():
    with pytest.raises(ValueError, match=r"^count is 5: give how many sources are live, 1 to 4$"):
        depth_weights(ROWS, VECTOR, count=5)


@pytest.mark.parametrize("shape", [(4, 0, 8), (4, 2, 0, 8)])
def test_no_tokens(shape):
    """Nothing to do by default; a named kernel has no block for them."""
    rows = jnp.zeros(shape)
    assert depth_mix(rows, VECTOR).shape == shape[1:]
    assert phase1(rows, QUERIES)[0].shape == (3, *shape[1:])
    for form in ("mosaic_tpu", "mosaic_gpu"):
        with pytest.raises(ValueError, match="some tokens"):
            depth_mix(rows, VECTOR, implementation=form)
        with pytest.raises(ValueError, match="some tokens"):
            phase1(rows, QUERIES, implementation=form)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_mixtures_of_dtypes_that_no_kernel_takes(dtype):
    with jax.enable_x64(True), pytest.raises(ValueError, match=f"^sources are {dtype} of"):
        depth_mix(ROWS.astype(dtype), VECTOR, implementation="mosaic_tpu")
