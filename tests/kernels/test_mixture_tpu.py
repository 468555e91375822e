"""The TPU kernels of the depth mixture, interpreted, against naive float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType

from depthjax.kernels import depth_mix, depth_read, gather_rows, mix_rows
from depthjax.kernels.mixture import tiles

BFLOAT16, FLOAT32 = (jnp.bfloat16, 1e-2), (jnp.float32, 1e-5)
EPS = 1e-6


@pytest.fixture(autouse=True)
def no_races(monkeypatch):
    """A read of what no copy has brought yet is an error (JAX 0.12) or a NaN. With fewer rows a
    step than on a TPU, which compiles faster."""
    monkeypatch.setattr(tiles, "GROUPS", (2, 1))
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
    pltpu.reset_tpu_interpret_mode_state()


def normal(seed, *shape, dtype=jnp.float32, size=1.0):
    return (size * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def float64(function, *arguments):
    """The result in NumPy of a function of the arguments in float64."""
    with jax.enable_x64(True):
        wide = [None if x is None else jnp.asarray(np.asarray(x, np.float64)) for x in arguments]
        return jax.tree.map(np.asarray, jax.jit(function)(*wide))


def assert_within(bound, actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        error = np.max(np.abs(np.asarray(a, np.float64) - b), initial=0)
        assert error <= bound * np.max(np.abs(b), initial=1e-30), error


def naive(sources, u, scale):
    """(mixture, log-sum-exp), the key norm and the softmax spelled out."""
    inverse = 1 / jnp.sqrt(jnp.mean(sources**2, -1) + EPS)
    logits = jnp.sum(sources * u, -1) * inverse
    z = jnp.sum(jax.nn.softmax(logits, axis=0)[..., None] * sources, axis=0)
    if scale is not None:
        z = z / jnp.sqrt(jnp.mean(z**2, -1, keepdims=True) + EPS) * scale
    return z, jax.nn.logsumexp(logits, axis=0)


def read_and_gradients(read, cotangents, *arguments):
    """The mixture and the cotangents of (history, newest, direction, scale)."""
    x, pull = jax.vjp(read, *arguments)
    return x[0], pull(tuple(c.astype(one.dtype) for c, one in zip(cotangents, x, strict=True)))


@pytest.mark.parametrize(
    ("rows", "count", "tokens", "width", "scaled", "precision", "size"),
    [
        (6, 5, (2, 8), 128, True, FLOAT32, 1.0),
        (3, 1, (1, 5), 72, False, FLOAT32, 1e-4),
        (2, 2, (1,), 128, True, FLOAT32, 1e4),
        (9, 9, (3, 7), 640, True, BFLOAT16, 1.0),
        (2, 1, (), 72, False, BFLOAT16, 1.0),
    ],
)
def test_reading(rows, count, tokens, width, scaled, precision, size):
    """Values and gradients; dead rows hold NaN, and their cotangents stay as they are. What comes
    back behind the mixture has a cotangent of its own."""
    dtype, bound = precision
    history = normal(0, rows, *tokens, width, dtype=dtype, size=size)
    newest = normal(1, *tokens, width, dtype=dtype, size=size)
    u, scale = normal(2, width, size=0.3), normal(3, width) if scaled else None
    d_x = normal(4, *tokens, width, dtype=dtype)
    d_history = normal(5, *history.shape, dtype=dtype)
    cotangents = d_x, d_history, normal(6, *newest.shape, dtype=dtype)

    def plain(history, newest, u, scale):
        sources = jnp.concatenate([history[:count], newest[None]])
        return naive(sources, u, scale)[0], history, newest

    def kernel(history, newest, u, scale):
        return depth_read(history, newest, u, count, EPS, scale, implementation="mosaic_tpu")

    arguments = newest, u, scale
    expected = float64(
        lambda *given: read_and_gradients(plain, given[:3], *given[3:]),
        *(*cotangents, history, *arguments),
    )
    poisoned = history.at[count:].set(jnp.nan)
    actual = jax.jit(lambda *given: read_and_gradients(kernel, cotangents, *given))(
        poisoned, *arguments
    )
    assert_within(bound, actual, expected)
    np.testing.assert_array_equal(actual[1][0][count:], d_history[count:])


@pytest.mark.jax_version
def test_reading_under_a_traced_count():
    """One program for all counts, none live among them."""
    history, newest, u = normal(0, 6, 3, 128), normal(1, 3, 128), normal(2, 128)
    d_history = normal(4, 6, 3, 128)

    @jax.jit
    def read(count):
        def run(history, newest, u):
            return depth_read(history, newest, u, count, EPS, implementation="mosaic_tpu")

        return read_and_gradients(run, (newest, d_history, newest), history, newest, u)

    for count in (0, 1, 4, 6):

        def plain(history, newest, u, count=count):
            mixture, _ = naive(jnp.concatenate([history[:count], newest[None]]), u, None)
            return mixture, history, newest

        expected = float64(
            lambda d, *given: read_and_gradients(plain, (given[1], d, given[1]), *given),
            *(d_history, history, newest, u),
        )
        actual = read(count)
        assert_within(1e-5, actual[0], expected[0])
        assert_within(1e-5, actual[1][:2], expected[1][:2])
        np.testing.assert_allclose(actual[1][2], expected[1][2], rtol=1e-4, atol=1e-4)


def test_a_saturated_softmax(monkeypatch):
    """Logits of thousands: one source takes all, and nothing overflows. With four rows a step."""
    monkeypatch.setattr(tiles, "GROUPS", (4, 1))
    history, newest, u = normal(0, 3, 4, 128), normal(1, 4, 128), normal(2, 128, size=1e3)
    history = history.at[1].set(0)  # eps alone is in its norm
    x, *_ = depth_read(history, newest, u, 3, EPS, implementation="mosaic_tpu")
    expected = float64(
        lambda h, n, u: naive(jnp.concatenate([h, n[None]]), u, None)[0], history, newest, u
    )
    assert_within(1e-5, x, expected)


@pytest.mark.parametrize("tokens", [40, 24])
def test_several_blocks_of_tokens(tokens, monkeypatch):
    """Blocks of 16, the last one not full or an odd number of them."""
    monkeypatch.setattr(tiles, "MOST_TOKENS", 16)
    history, newest = normal(0, 3, tokens, 128), normal(1, tokens, 128)
    u, scale, d_history = normal(2, 128), normal(3, 128), normal(4, 3, tokens, 128)

    def run(implementation):
        def read(*given):
            history, newest, u, scale = given
            return depth_read(history, newest, u, 2, EPS, scale, implementation=implementation)

        return read_and_gradients(read, (newest, d_history, newest), history, newest, u, scale)

    assert_within(1e-5, jax.jit(run, static_argnums=0)("mosaic"), run("xla"))


@pytest.mark.jax_version
@pytest.mark.parametrize(
    ("readers", "index", "tokens", "width", "precision"),
    [(5, 1, 7, 72, FLOAT32), (6, 5, 130, 128, FLOAT32), (9, 0, 7, 640, BFLOAT16)],
)
def test_the_pull_form(readers, index, tokens, width, precision):
    """`mix_rows` and `gather_rows`; rows that are not theirs hold NaN."""
    dtype, _ = precision
    rows = normal(0, readers, 1, tokens, width, dtype=dtype)
    last = normal(1, 1, tokens, width, dtype=dtype)
    directions, delta = normal(2, readers, width, size=0.3), normal(3, readers, 1, tokens)
    lse = 2 + normal(4, readers, 1, tokens)

    expected = float64(
        lambda rows, *given: gather_rows(rows, index, *given, EPS, implementation="xla"),
        *(rows, last, directions, lse, delta),
    )
    poisoned = rows.at[:index].set(jnp.nan)
    actual = gather_rows(
        poisoned, index, last, directions, lse, delta, EPS, implementation="mosaic_tpu"
    )
    assert_within(1e-5, actual, expected)
    rounded, _ = gather_rows(
        *(poisoned, index, last, directions, lse, delta, EPS),
        dtype=jnp.bfloat16,
        implementation="mosaic_tpu",
    )
    np.testing.assert_array_equal(rounded, actual[0].astype(jnp.bfloat16))

    expected = float64(lambda rows, u: naive(rows[: index + 1], u, None), rows, directions[0])
    poisoned = rows.at[index + 1 :].set(jnp.nan)
    actual = mix_rows(poisoned, index + 1, directions[0], EPS, implementation="mosaic_tpu")
    assert_within(1e-5, actual, expected)


@pytest.mark.jax_version
def test_on_a_mesh():
    """Each device has its rows of the batch and its tokens; parameters have the gradient of all."""
    given = normal(0, 4, 4, 6, 128), normal(1, 4, 6, 128), normal(2, 128), normal(3, 128)
    d_history, delta = normal(4, 4, 4, 6, 128), normal(5, 4, 4, 6)

    def read(history, newest, u, scale):
        return depth_read(history, newest, u, 3, EPS, scale, implementation="mosaic_tpu")

    def run():
        """A new function each time, since a trace under another mesh would be another program."""
        history, newest, u, _ = given
        directions = jnp.stack([u] * 4)
        pulled = gather_rows(
            history, 1, newest, directions, delta, delta, EPS, implementation="mosaic_tpu"
        )
        return read_and_gradients(read, (newest, d_history, newest), *given), pulled

    alone = jax.jit(lambda: run())()
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        spread = jax.jit(lambda: run())()
    assert_within(1e-5, spread, alone)


@pytest.mark.jax_version
def test_the_public_mixture():
    sources, query, scale = normal(0, 3, 2, 5, 72), normal(1, 72), normal(2, 72)

    def gradients(implementation):
        def loss(*given):
            mixed = depth_mix(*given[:2], output_scale=given[2], implementation=implementation)
            return jnp.sum(jnp.sin(mixed))

        return jax.value_and_grad(loss, (0, 1, 2))(sources, query, scale)

    assert_within(1e-5, jax.jit(gradients, static_argnums=0)("mosaic_tpu"), gradients("xla"))


def test_a_mixture_of_some_rows():
    sources, newest, query = normal(0, 4, 5, 128), normal(1, 5, 128), normal(2, 128)

    def gradients(implementation):
        def loss(*given):
            options = {"count": 2, "newest": given[1], "implementation": implementation}
            return jnp.sum(jnp.sin(depth_mix(given[0], given[2], **options)))

        return jax.value_and_grad(loss, (0, 1, 2))(sources, newest, query)

    assert_within(1e-5, jax.jit(gradients, static_argnums=0)("mosaic_tpu"), gradients("xla"))


def test_shapes_that_do_not_go_together():
    sources, query = jnp.zeros((3, 2, 8)), jnp.zeros(8)
    with pytest.raises(ValueError, match=r"^query has shape \(7,\), but sources of shape"):
        depth_mix(sources, jnp.zeros(7))
    with pytest.raises(ValueError, match=r"^newest has shape \(8,\), .* need \(2, 8\)$"):
        depth_mix(sources, query, newest=query)
    with pytest.raises(ValueError, match=r"^sources has shape \(8,\): give \[N, ..., D\]"):
        depth_mix(query, query)
    with pytest.raises(ValueError, match=r"^bias or keep is given: only"):
        depth_mix(sources, query, bias=jnp.zeros(3), implementation="mosaic_tpu")
