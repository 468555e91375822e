"""Array functions over depth, beyond what the models exercise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from depthjax.kernels import depth_mix, depth_read, phase1, phase2, read_streams, stream_products
from depthjax.kernels.streams.xla import _split_product

pytestmark = pytest.mark.jax_version


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.mark.parametrize("columns", [(32, 6), (4, 32, 6)], ids=["a stream", "all streams"])
def test_products_of_bfloat16_streams_are_as_exact_as_float32(columns):
    streams, columns = normal(0, 4, 2, 16, 32, dtype=jnp.bfloat16), normal(1, *columns)
    products, squares = jax.jit(stream_products)(streams, columns)
    wide, exact = np.asarray(streams, np.float64), np.asarray(columns, np.float64)
    subscripts = "dc,m...d->cm..." if columns.ndim == 2 else "mdc,m...d->c..."
    np.testing.assert_allclose(products, np.einsum(subscripts, exact, wide), rtol=0, atol=2e-5)
    np.testing.assert_allclose(squares, np.mean(wide**2, -1), rtol=1e-5)


def test_three_bfloat16_terms_hold_a_float32():
    """What accelerators multiply bfloat16 streams with; the products here in float32."""
    streams, columns = normal(0, 2, 16, 32, dtype=jnp.bfloat16), normal(1, 32, 6)
    with jax.disable_jit():
        actual = _split_product("dc,...d->c...", columns, streams.astype(jnp.float32))
    exact = np.einsum("dc,...d->c...", np.asarray(columns, float), np.asarray(streams, float))
    np.testing.assert_allclose(actual, exact, rtol=0, atol=2e-5)


def test_bfloat16_streams_have_gradients():
    def weigh(params, products, squares):
        read = jax.nn.sigmoid(products[0] + params)
        return read, read, jnp.stack([read] * 4)

    def loss(params, columns, streams):
        x, mixed, _ = read_streams(weigh, 1e-6, params, columns, jnp.ones(32), streams)
        return jnp.sum(x.astype(jnp.float32)) + jnp.mean(mixed.astype(jnp.float32))

    compute = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    narrow = compute(0.5, normal(1, 32, 1), normal(0, 4, 2, 16, 32, dtype=jnp.bfloat16))
    wide = compute(0.5, normal(1, 32, 1), normal(0, 4, 2, 16, 32, dtype=jnp.bfloat16) * 1.0)
    for a, b in zip(narrow, wide, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=0.02 * float(jnp.max(jnp.abs(b))))


@pytest.mark.parametrize("count", [0, 2, 4])
def test_reading_has_second_derivatives(count):
    """Forward over reverse, as Hessian-vector products are taken, also where no row is live."""
    with jax.enable_x64(True):
        shapes = (4, 2, 8), (2, 8), (8,)
        history, newest, u = (normal(i, *s, dtype=jnp.float64) for i, s in enumerate(shapes))

        def read(history, newest):
            return jnp.sum(jnp.sin(depth_read(history, newest, u, count, 1e-6)[0]))

        def mix(history, newest):
            return jnp.sum(jnp.sin(depth_mix(history, u, count=count, newest=newest)))

        at = (history, newest)
        products = [jax.jvp(jax.grad(f, (0, 1)), at, at)[1] for f in (read, mix)]
        for a, b in zip(*products, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda v, u, form: depth_mix(v, u, implementation=form),
        lambda v, u, form: phase1(v, jnp.stack([u, -u]), implementation=form),
        lambda v, u, form: phase2(
            v[0], v[0, :, 0], v[1], v[2], query=u, norm_scale=u, implementation=form
        ),
        lambda v, u, form: depth_read(v, v[0], u, 2, 1e-6, u, implementation=form),
        lambda v, u, form: read_streams(
            lambda a, products, squares: (a * squares, a * squares, jnp.stack([a * squares] * 3)),
            1e-6,
            u[0],
            None,
            u,
            v,
            implementation=form,
        )[:2],
    ],
    ids=["depth_mix", "phase1", "phase2", "depth_read", "read_streams"],
)
def test_interpreted_kernels_are_computed_again_in_a_backward_pass(function):
    """Under `jax.checkpoint`, as any other function."""
    arrays = normal(0, 3, 16, 128), normal(1, 128)

    def gradients(form, wrap):
        def loss(v, u):
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(function(v, u, form)))

        return jax.jit(jax.grad(wrap(loss), argnums=(0, 1)))(*arrays)

    expected = gradients("xla", lambda loss: loss)
    for actual, wanted in zip(gradients("mosaic", jax.checkpoint), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-5 * jnp.max(jnp.abs(wanted)))
