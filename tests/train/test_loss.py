"""The loss, against a softmax over all logits at once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from depthjax.train.loss import CHUNK_LOGITS, CHUNK_LOGITS_CPU, chunk_count, cross_entropy
from depthjax.train.step import Program

pytestmark = pytest.mark.jax_version


def problem(batch=8, length=7, width=16, vocab=40, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    features = jax.random.normal(keys[0], (batch, length, width), dtype)
    head = jax.random.normal(keys[1], (width, vocab), dtype)
    targets = jax.random.randint(keys[2], (batch, length), 0, vocab)
    weights = jax.random.uniform(keys[3], (batch, length)) - 0.3  # some tokens do not count
    return features, head, targets, jnp.maximum(weights, 0).astype(dtype)


def naive(features, head, targets, weights):
    logits = features @ head
    return jnp.sum(weights * optax.softmax_cross_entropy_with_integer_labels(logits, targets))


def value_and_gradients(function, features, head, targets, weights):
    def loss(features, head, weights):
        return 3 * function(features, head, targets, weights)  # a cotangent that is not one

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(features, head, weights)


def assert_close(actual, expected, rtol):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max()),
        actual,
        expected,
    )


@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 100])
def test_value_and_gradients_in_float64(chunks):
    """Chunks that do not divide the sequence, and more of them than tokens, included."""
    with jax.enable_x64(True):
        arguments = problem(dtype=jnp.float64)

        def chunked(*arguments):
            return cross_entropy(*arguments, chunks=chunks)

        assert_close(
            value_and_gradients(chunked, *arguments), value_and_gradients(naive, *arguments), 1e-12
        )
        assert_close(jax.jit(chunked)(*arguments), naive(*arguments), 1e-12)


def test_half_precision_keeps_a_wide_sum():
    """bf16 products, but an fp32 softmax and an fp32 sum over tokens; dtypes as they came."""
    features, head, targets, weights = problem(length=64)
    half = features.astype(jnp.bfloat16)
    rounded = half.astype(jnp.float32), head.astype(jnp.bfloat16).astype(jnp.float32)
    loss, gradients = value_and_gradients(cross_entropy, half, head, targets, weights)
    expected, wide = value_and_gradients(naive, *rounded, targets, weights)
    assert loss.dtype == gradients[1].dtype == jnp.float32
    assert gradients[0].dtype == jnp.bfloat16
    np.testing.assert_allclose(loss, expected, rtol=2e-3)
    np.testing.assert_allclose(gradients[1], wide[1], rtol=0, atol=0.01 * np.abs(wide[1]).max())


def test_ignored_positions_may_hold_anything():
    features, head, targets, weights = problem()
    ignored = weights == 0
    assert 5 < ignored.sum() < 50
    poisoned = jnp.where(ignored[..., None], 1e30, features), head, targets, weights
    expected = cross_entropy(features, head, targets, weights)
    np.testing.assert_allclose(cross_entropy(*poisoned, chunks=3), expected, rtol=1e-6)
    gradient = jax.grad(cross_entropy)(features, head, targets, weights)
    assert not np.asarray(gradient)[np.asarray(ignored)].any()


@pytest.mark.parametrize(
    ("batch", "length", "vocab"),
    [(8, 2048, 50280), (8, 2048, 163840), (1, 4099, 163840), (2, 9, 5)],
)
@pytest.mark.parametrize(("where", "most"), [("tpu", CHUNK_LOGITS), ("cpu", CHUNK_LOGITS_CPU)])
def test_chunks_hold_a_bounded_number_of_logits(monkeypatch, batch, length, vocab, where, most):
    monkeypatch.setattr("depthjax.train.loss.platform", lambda: where)
    chunks = chunk_count(batch, length, vocab)
    size = -(-length // chunks)
    assert batch * size * vocab <= most + batch * vocab
    assert chunks == 1 or batch * length * vocab > most * chunks / 2
    if length == 2048:
        assert length % chunks == 0


def test_no_chunks_is_an_error():
    with pytest.raises(ValueError, match=r"^chunks is 0: give at least 1$"):
        cross_entropy(*problem(), chunks=0)


def shapes_in(text):
    """Dimensions of all arrays that a compiled program names."""
    return {tuple(map(int, found.split(","))) for found in re.findall(r"\w\[([\d,]+)\]", text)}


def test_training_step_never_holds_all_logits(small_config, monkeypatch):
    monkeypatch.setattr("depthjax.train.loss.CHUNK_LOGITS_CPU", 2**15)
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    program = Program(small_config, 1024, mesh)
    size = (small_config.train.batch, small_config.model.context)
    batch = jax.ShapeDtypeStruct(size, jnp.int32, sharding=program.by_row)
    text = program.step.lower(program.abstract_state(), batch).compile().as_text()
    largest = max(np.prod(shape) for shape in shapes_in(text) if 1024 in shape)
    assert largest < np.prod(size) * 1024 / 2


def collectives(text):
    """{(operation, shape)} of a compiled program's collectives that move more than a few scalars,
    and how many there are outside of and within loops."""
    found = re.findall(r"= \(?\w+\[([\d,]*)\]\S* (all-\w+|reduce-scatter|collective-\w+)\(", text)
    return [(op, tuple(map(int, dims.split(",")))) for dims, op in found if dims]


@pytest.mark.parametrize("chunks", [1, 3])
def test_divided_batch(chunks):
    """Over eight devices: the same numbers, and one sum of the head's gradient in the program,
    outside of the loop over chunks."""
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    arguments = problem()

    def chunked(*arguments):
        return cross_entropy(*arguments, chunks=chunks)

    expected = value_and_gradients(naive, *arguments)
    with jax.set_mesh(mesh):
        specs = P("data"), P(), P("data"), P("data")
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(arguments, specs, strict=True)
        ]
        assert_close(value_and_gradients(chunked, *placed), expected, 2e-6)
        lowered = jax.jit(jax.grad(chunked, (0, 1))).lower(*placed)
        text = lowered.compile().as_text()
    assert [c for c in collectives(text) if c[1]] == [("all-reduce", (16, 40))]
    assert not any("all-" in body for body in loop_bodies(text))


def loop_bodies(text):
    names = re.findall(r"body=%?([\w.]+)", text)
    return [text.split(f"%{name} (")[1].split("\n}")[0] for name in names]


def test_head_divided_over_its_ids():
    """On a 2 x 4 mesh with the head [D, V / 4] on a device: the same numbers, while neither the
    head nor any logits are brought together."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), (AxisType.Auto,) * 2)
    arguments = problem()
    expected = value_and_gradients(naive, *arguments)
    specs = P("data"), P(None, "tensor"), P("data"), P("data")
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    placed = [jax.device_put(x, s) for x, s in zip(arguments, shardings, strict=True)]

    def chunked(*arguments):
        return cross_entropy(*arguments, chunks=2)

    with jax.set_mesh(mesh):
        assert_close(value_and_gradients(chunked, *placed), expected, 2e-6)
        gradient = jax.jit(jax.grad(chunked, (0, 1)), out_shardings=tuple(shardings[:2]))
        text = gradient.lower(*placed).compile().as_text()
    assert collectives(text)
    assert not [c for c in collectives(text) if 40 in c[1] or "all-gather" in c[0]]
    assert not any(40 in shape for shape in shapes_in(text))
