"""The contract of inference: a cache changes nothing, whatever the residual connection."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_battery import FORMS, VOCAB, build, every_form, every_rule, tokens

from depthjax.infer import decode_step, prefill


def check_against_full_forward(rule, chunk=None):
    """In float64, with prompts of several lengths, and one program for every position of a decoded
    token. Attention has fewer heads for keys than for queries."""
    traces = []

    def step(model, ids, cache):
        traces.append(1)
        return decode_step(model, ids, cache)

    with jax.enable_x64(True):
        model = build(rule, dtype=jnp.float64, param_dtype=jnp.float64)
        model = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), model)
        ids, lengths, rows = tokens(3, 8), np.array([2, 5, 4]), np.arange(3)
        expected = jax.jit(lambda model, ids: model(ids))(model, ids)
        padded = np.where(np.arange(5) < lengths[:, None], ids[:, :5], VOCAB - 1)
        first = jax.jit(prefill, static_argnames=("size", "chunk"))
        logits, cache = first(model, padded, size=9, lengths=lengths, chunk=chunk)
        step = jax.jit(step, donate_argnums=2)
        for at in (lengths, lengths + 1, lengths + 2):
            allowed = 1e-10 * float(jnp.max(jnp.abs(expected)))
            np.testing.assert_allclose(logits, expected[rows, at - 1], rtol=0, atol=allowed)
            logits, cache = step(model, ids[rows, at], cache)
        assert len(traces) == 1
        np.testing.assert_array_equal(cache.length, lengths + 3)
        assert cache.used == 5 + 3


@every_form
def test_prefill_and_decode_are_the_full_forward(rule):
    check_against_full_forward(rule)


@pytest.mark.jax_version
@pytest.mark.parametrize("name", ["pre_ln", "block_attnres_b3", "moda"])
def test_a_prompt_in_chunks_is_the_full_forward(name):
    """The second row ends in the middle of the last chunk, the first in front of the second."""
    check_against_full_forward(FORMS[name], chunk=2)


@every_rule
def test_the_cache_holds_keys_and_values_alone(rule):
    """2 L K E elements a token, to which the depth state adds nothing."""
    model = jax.eval_shape(lambda: build(rule))
    ids = jax.ShapeDtypeStruct((2, 7), jnp.int32)
    _, cache = jax.eval_shape(lambda model, ids: prefill(model, ids, 8), model, ids)
    shape = model.shape
    entries = (shape.layers, 2, 8, shape.kv_heads, shape.head_dim)
    assert cache.key.shape == cache.value.shape == entries
    assert [x.size for x in jax.tree.leaves(cache)[2:]] == [16, 2, 1]


@pytest.mark.jax_version
def test_sharded_decoding_is_that_of_a_single_device():
    """The cache is divided by rows, as activations are."""
    model, ids = build(FORMS["block_attnres_b3"]), tokens(8, 6)
    first = jax.jit(prefill, static_argnames="size")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    expected, cache = first(model, ids[:, :5], size=8)
    expected_next, _ = jax.jit(decode_step)(model, ids[:, 5], cache)
    with jax.set_mesh(mesh):
        model = jax.device_put(model, NamedSharding(mesh, P()))
        ids = jax.device_put(ids, NamedSharding(mesh, P("data")))
        logits, cache = first(model, ids[:, :5], size=8)
        assert {s.data.shape[1] for s in cache.key.addressable_shards} == {1}
        logits_next, cache = jax.jit(decode_step)(model, ids[:, 5], cache)
        assert {s.data.shape[1] for s in cache.key.addressable_shards} == {1}
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits_next, expected_next, rtol=0, atol=1e-4)


def test_a_cache_too_small_is_refused():
    model = build(FORMS["pre_ln"])
    with pytest.raises(ValueError, match="size is 5: give at least 6"):
        prefill(model, tokens(1, 5), 5, chunk=3)
