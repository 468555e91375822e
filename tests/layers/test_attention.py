"""Attention, against a softmax over all pairs of tokens."""

import functools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from depthjax.kernels import flash
from depthjax.kernels import past_attention as past
from depthjax.kernels.flash import flash_attention
from depthjax.kernels.joint_attention import joint_attention
from depthjax.kernels.past_attention import past_attention
from depthjax.layers import Attention
from depthjax.layers.attention import causal_attention
from depthjax.layers.rope import rope

pytestmark = pytest.mark.jax_version


def problem(batch=2, length=256, heads=4, kv_heads=2, size=24, dtype=jnp.float32):
    """query, key, value, and cotangents of the mixture and of the log-sum-exp."""
    keys = jax.random.split(jax.random.key(0), 5)
    of_query, of_key = (batch, length, heads, size), (batch, length, kv_heads, size)
    shapes = of_query, of_key, of_key, of_query, of_query[:-1]
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


def naive(query, key, value):
    """(mixture, log-sum-exp), by the definition."""
    grouped = query.reshape(*key.shape[:3], -1, key.shape[3])
    logits = jnp.einsum("btkge,bske->btkgs", grouped, key) / np.sqrt(key.shape[3])
    causal = jnp.tril(jnp.ones((query.shape[1],) * 2, bool))
    logits = jnp.where(causal[:, None, None], logits, -jnp.inf)
    mixed = jnp.einsum("btkgs,bske->btkge", jax.nn.softmax(logits), value)
    return mixed.reshape(query.shape), jax.nn.logsumexp(logits, -1).reshape(query.shape[:3])


def values_and_gradients(function, query, key, value, *cotangents):
    @jax.jit
    def run(*arguments):
        values, pull = jax.vjp(function, *arguments)
        return values, pull(cotangents)

    return run(query, key, value)


def assert_close(actual, expected, tolerance):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max()),
        actual,
        expected,
    )


@pytest.mark.parametrize(("length", "block"), [(7, 512), (24, 8), (23, 8)])
def test_blocks_of_keys_in_float64(monkeypatch, length, block):
    """Values, log-sum-exp, and the gradients through both; blocks that do not divide the sequence
    included."""
    monkeypatch.setattr(flash, "BLOCK", block)
    with jax.enable_x64(True):
        arguments = problem(length=length, dtype=jnp.float64)
        expected = values_and_gradients(naive, *arguments)
        assert_close(values_and_gradients(flash_attention, *arguments), expected, 1e-13)


@pytest.mark.parametrize(("size", "length"), [(24, 256), (128, 256), (24, 5 * 128)])
def test_kernels_of_the_tpu(size, length):
    """Interpreted: values, log-sum-exp, and the gradients through both; 5 blocks have a kernel of
    their own for the gradient of the query."""
    arguments = problem(1, length, size=size)
    kernels = functools.partial(flash_attention, implementation="splash")
    expected = values_and_gradients(naive, *arguments)
    assert_close(values_and_gradients(kernels, *arguments), expected, 3e-6)


@pytest.mark.parametrize("names", [("data", "tensor"), ("fsdp", "other")])
def test_kernels_on_a_mesh(names):
    """Each device takes its rows, and its heads along `tensor`; nothing moves between devices."""
    mesh = jax.make_mesh((4, 2), names, (AxisType.Auto,) * 2)
    arguments = problem(batch=4, length=128)
    expected = values_and_gradients(naive, *arguments)
    kernels = functools.partial(flash_attention, implementation="splash")
    rows = NamedSharding(mesh, P(names[0], None, "tensor" if "tensor" in names else None))
    with jax.set_mesh(mesh):
        placed = jax.device_put(arguments, rows)
        assert_close(values_and_gradients(kernels, *placed), expected, 3e-6)
        text = jax.jit(kernels).lower(*placed[:3]).compile().as_text()
    assert not re.search(r"all-\w+\(|collective-\w+\(", text)


def test_implementations_agree():
    x = jax.random.normal(jax.random.key(1), (2, 128, 32))
    plain, kernels = (
        Attention(32, 4, 2, 8, implementation=name, rngs=nnx.Rngs(0)) for name in ("xla", "splash")
    )
    gradients = [
        jax.jit(jax.grad(lambda m, x: jnp.sum(m(x)[0] ** 2), 1))(m, x) for m in (plain, kernels)
    ]
    assert_close(kernels(x)[0], plain(x)[0], 3e-6)
    assert_close(gradients[1], gradients[0], 3e-6)


def joint_problem(count, **options):
    """Arguments of the joint attention with three entries a token, the dead ones infinite."""
    query, key, value, *_ = problem(**options)
    entries = jax.random.normal(jax.random.key(5), (2, 3, *key.shape), key.dtype)
    live = jnp.arange(3)[:, None, None, None, None] < count
    return query, key, value, *jnp.where(live, entries, jnp.inf)


def naive_joint(count, query, key, value, depth_key, depth_value):
    """One softmax over all keys of a token, in one matrix [T, T + count] a head."""
    length, group = query.shape[1], query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    depth_key, depth_value = (jnp.repeat(x[:count], group, 3) for x in (depth_key, depth_value))
    logits = jnp.einsum("bthe,bshe->bhts", query, key)
    logits = jnp.where(jnp.tril(jnp.ones((length, length), bool)), logits, -jnp.inf)
    logits = jnp.concatenate([logits, jnp.einsum("bthe,nbthe->bhtn", query, depth_key)], -1)
    weights = jax.nn.softmax(logits / np.sqrt(query.shape[-1]))
    mixed = jnp.einsum("bhts,bshe->bthe", weights[..., :length], value)
    return mixed + jnp.einsum("bhtn,nbthe->bthe", weights[..., length:], depth_value)


@pytest.mark.parametrize("count", [0, 2, 3])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_joint_attention(monkeypatch, count, kv_heads):
    """One softmax over the sequence and the live entries of a token, and its gradients; dead
    entries, whatever they hold, have none. The count may be traced."""
    monkeypatch.setattr(flash, "BLOCK", 3)
    with jax.enable_x64(True):
        sizes = {"batch": 1, "length": 5, "heads": 2, "kv_heads": kv_heads, "size": 4}
        arguments = joint_problem(count, **sizes, dtype=jnp.float64)
        cotangent = jnp.cos(jnp.arange(arguments[0].size)).reshape(arguments[0].shape)

        @jax.jit
        def run(count, *arguments):
            mixed, pull = jax.vjp(lambda *a: joint_attention(*a, count), *arguments)
            return mixed, pull(cotangent)

        expected, pull = jax.vjp(functools.partial(naive_joint, count), *arguments)
        actual, gradients = run(count, *arguments)
        assert_close(actual, expected, 1e-13)
        for a, b in zip(gradients, pull(cotangent), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


def test_joint_attention_by_the_kernels_of_the_tpu():
    arguments = joint_problem(2, length=128)

    def run(implementation):
        def loss(*arguments):
            return jnp.sum(jnp.sin(joint_attention(*arguments, 2, implementation)))

        return jax.jit(jax.value_and_grad(loss, tuple(range(5))))(*arguments)

    assert_close(run("splash"), run("xla"), 3e-6)


def test_joint_attention_never_holds_all_pairs(monkeypatch):
    """Of 64 tokens, no array of 64 x 64 or more weights a head, forward or backward."""
    monkeypatch.setattr(flash, "BLOCK", 16)
    arguments = joint_problem(2, length=64, size=8)

    def loss(*arguments):
        return jnp.sum(joint_attention(*arguments, 2))

    text = jax.jit(jax.grad(loss, tuple(range(5)))).lower(*arguments).compile().as_text()
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", text)}
    assert max(map(np.prod, shapes)) <= 2 * 4 * 64 * 64 / 2


def test_unknown_implementation():
    with pytest.raises(ValueError, match=r"^implementation is 'fast': choose from xla, splash"):
        Attention(32, 4, 2, 8, implementation="fast", rngs=nnx.Rngs(0))


def test_input_that_the_kernels_do_not_take():
    with pytest.raises(ValueError, match=r"^splash attention was given 100 tokens of float32: it "):
        causal_attention(*problem(length=100)[:3], implementation="splash")


@pytest.mark.parametrize(("length", "kernels"), [(256, True), (200, False)])
def test_the_platform_of_the_mesh_decides(length, kernels):
    """Compiled ahead of time for TPUs, on any machine: the kernels, forward and backward, on each
    device's rows; XLA for sequences that they do not take."""
    pytest.importorskip("libtpu")
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    mesh = Mesh(np.array(topology.devices), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))
    arguments = [
        jax.ShapeDtypeStruct((4, length, heads, 56), jnp.bfloat16, sharding=rows)
        for heads in (4, 2, 2)
    ]

    def loss(*arguments):
        return jnp.sum(causal_attention(*arguments).astype(jnp.float32))

    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arguments)
    assert ("tpu_custom_call" in lowered.as_text()) == kernels
    text = lowered.compile({"xla_optimization_level": "EFFORT_O0"}).as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == (2 if kernels else 0)
    assert "all-gather" not in text


@pytest.mark.parametrize("slots", [5, 8, 11])
def test_tokens_that_follow_others_in_float64(monkeypatch, slots):
    """The second part of a sequence, the first out of a cache with empty slots between; slots that
    no block divides included, and blocks that are empty."""
    monkeypatch.setattr(past, "BLOCK", 4)
    with jax.enable_x64(True):
        query, key, value, *_ = problem(length=9, dtype=jnp.float64)
        expected = naive(query, key, value)
        for new in (4, 1):
            live = np.zeros((2, slots), bool)
            first = [np.full((2, slots, *x.shape[2:]), 1e3) for x in (key, value)]
            old = 4 if new == 4 else 3
            live[:, [0, 1, 2, 4][:old]] = True
            for buffer, x in zip(first, (key, value), strict=True):
                buffer[live] = x[:, :old].reshape(-1, *x.shape[2:])
            cache = *map(jnp.asarray, first), jnp.asarray(live), jnp.int32(5)
            arrays = [x[:, old : old + new] for x in (query, key, value)]
            actual = jax.jit(past_attention)(*arrays, cache)
            assert_close(actual, tuple(x[:, old : old + new] for x in expected), 1e-14)


def test_positions_start_where_each_row_is():
    x = jax.random.normal(jax.random.key(0), (2, 9, 3, 8))
    later = rope(x[:, 4:7], start=jnp.array([4, 4]))
    np.testing.assert_allclose(later, rope(x)[:, 4:7], rtol=0, atol=1e-6)
    shifted = rope(x[:, :3], start=jnp.array([0, 2]))
    np.testing.assert_allclose(shifted[0], rope(x)[0, :3], rtol=0, atol=1e-6)
    moved = rope(jnp.pad(x, ((0, 0), (2, 0), (0, 0), (0, 0))))[1, 2:5]
    np.testing.assert_allclose(shifted[1], moved, rtol=0, atol=1e-6)
