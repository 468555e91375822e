"""The functions on a mesh as `jax.make_mesh` makes it by default, whose axes are Explicit: types
carry how arrays are divided, and no kernel takes such arrays as they are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from depthjax.kernels import (
    depth_mix,
    depth_read,
    gather_rows,
    mix_rows,
    phase1,
    phase2,
    read_streams,
)

ROWS = jax.random.normal(jax.random.key(0), (3, 4, 2, 16))
VECTORS = jax.random.normal(jax.random.key(1), (3, 16))


def mixture(form, rows, vectors):
    options = {"count": 2, "output_scale": vectors[1], "implementation": form}
    return (depth_mix(rows, vectors[0], **options),)


def listed(form, rows, vectors):
    return (depth_mix([rows[0], rows[2]], vectors[0], implementation=form),)


def history(form, rows, vectors):
    return depth_read(rows, rows[0], vectors[0], 2, 1e-6, implementation=form)


def two_phases(form, rows, vectors):
    mixtures, lse = phase1(rows, vectors[:2], count=2, implementation=form)
    options = {"query": vectors[0], "norm_scale": vectors[1], "place": 1, "implementation": form}
    return mixtures, lse, *phase2(mixtures, lse, rows[0], rows[1], **options)


def streams(form, rows, vectors):
    def weigh(gates, products, squares):
        read = jax.nn.sigmoid(products[0]) + gates[0]
        return read, 2 * read, jnp.stack([read, squares, read * squares])

    columns = vectors[:1].T
    return read_streams(
        weigh, 1e-6, [vectors[1, :1]], columns, vectors[2], rows, implementation=form
    )


assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)

FUNCTIONS = [mixture, listed, history, two_phases, streams]


def divided(function, form, *arrays):
    """Its results on a mesh of four, and the gradients of a sum of them."""

    def loss(*arrays):
        results = function(form, *arrays)
        return sum(jnp.sum(jnp.sin(x)) for x in results), results

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(*arrays)


def on_the_mesh(rows, *others):
    """A mesh, and the arrays on it, the batch divided."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    rows = jax.device_put(rows, NamedSharding(mesh, P(None, "data")))
    return mesh, (rows, *(jax.device_put(x, NamedSharding(mesh, P())) for x in others))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_results_and_gradients(function):
    expected = divided(function, "xla", ROWS, VECTORS)
    mesh, arrays = on_the_mesh(ROWS, VECTORS)
    with jax.set_mesh(mesh):
        results = divided(function, "xla", *arrays)
    jax.tree.map(assert_close, results, expected)
    for x in jax.tree.leaves(results[1]):
        assert "data" in x.sharding.spec


def test_a_kernel():
    (expected,) = mixture("xla", ROWS, VECTORS)
    mesh, arrays = on_the_mesh(ROWS, VECTORS)
    with jax.set_mesh(mesh):
        (result,) = jax.jit(functools.partial(mixture, "mosaic_tpu"))(*arrays)
    assert_close(result, expected)
    assert result.sharding.spec[0] == "data"


def test_no_sources():
    mesh, _ = on_the_mesh(ROWS)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"^sources have shapes \[\]: give"):
        depth_mix([], VECTORS[0])


def test_the_pull_form():
    arrays = ROWS, ROWS[0], VECTORS, ROWS[..., 0], ROWS[..., 1]

    def run(rows, last, directions, lse, delta):
        found = gather_rows(rows, 1, last, directions, lse, delta, 1e-6, implementation="xla")
        return *found, *mix_rows(rows, 2, directions[0], 1e-6, implementation="xla")

    expected = jax.jit(run)(*arrays)
    mesh, (rows, *rest) = on_the_mesh(*arrays)
    with jax.set_mesh(mesh):
        results = jax.jit(run)(rows, *rest)
    jax.tree.map(assert_close, results, expected)
