"""The update and the held-out losses, against what they are defined to be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from changed import change
from jax.sharding import AxisType

from depthjax.train.evaluate import heldout_losses
from depthjax.train.inputs import open_data
from depthjax.train.step import Program

pytestmark = pytest.mark.jax_version

VOCAB = 8192


def one_device():
    return jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])


def eight_devices():
    return jax.make_mesh((8,), ("data",), (AxisType.Auto,))


def batch(config, seed=0):
    size = (config.train.batch, config.model.context)
    return np.random.default_rng(seed).integers(0, VOCAB, size, np.int32)


def after_steps(config, mesh, steps=2):
    program = Program(config, VOCAB, mesh)
    state = program.init()
    for seed in range(steps):
        state, metrics = program.step(state, program.put(batch(config, seed)))
    return state, metrics


def assert_same_params(a, b, atol):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=atol), a, b)


@pytest.mark.parametrize(
    ("fields", "mesh"),
    [({"accumulate": 4}, one_device), ({}, eight_devices)],
    ids=["accumulated", "eight devices"],
)
def test_how_a_batch_is_divided_does_not_matter(small_config, fields, mesh):
    """Four micro-batches, or eight devices, compute what one device does at once."""
    config = change(small_config, run={"depth_sizes": True}, train={"adam_eps": 1e-3})
    whole, metrics = after_steps(config, one_device())
    divided, other = after_steps(change(config, train=fields), mesh())
    assert_same_params(whole.params, divided.params, atol=2e-6)
    for name in ("loss", "grad_norm", "learning_rate", "stream_rms"):
        np.testing.assert_allclose(metrics[name], other[name], rtol=1e-4)
    if not fields:  # micro-batches have means of their own, so larger gradients a token
        np.testing.assert_allclose(metrics["gradient_rms"], other["gradient_rms"], rtol=1e-4)


def test_depth_sizes(small_config):
    """stream_rms[0] is the RMS of the embedded tokens; there is one size a layer boundary and one
    gradient a sublayer."""
    config = change(small_config, run={"depth_sizes": True})
    program = Program(config, VOCAB, one_device())
    state = program.init()
    embedded = np.asarray(state.params["embedding"])[batch(config)]
    _, metrics = program.step(state, program.put(batch(config)))
    assert metrics["stream_rms"].shape == (3,)
    assert metrics["gradient_rms"].shape == (4,)
    np.testing.assert_allclose(metrics["stream_rms"][0], np.sqrt((embedded**2).mean()), rtol=1e-5)
    assert np.all(metrics["gradient_rms"] > 0)


def poison(params):
    """Infinity in one weight: the loss and all gradients stop being numbers."""
    return {**params, "embedding": params["embedding"].at[:].set(jnp.inf)}


@pytest.mark.parametrize("cause", ["not finite", "exploding"])
def test_guard_skips_the_update(small_config, cause):
    """Nothing but the counters changes; the next good update starts a new row."""
    config = change(small_config, train={"guard_norm": 1e-3}) if cause == "exploding" else None
    program = Program(config or small_config, VOCAB, one_device())
    state = program.init()
    if cause == "not finite":
        state = state._replace(params=poison(state.params))
    before = jax.tree.map(np.array, state)
    for count in (1, 2):
        state, metrics = program.step(state, program.put(batch(small_config)))
        assert int(metrics["skipped_in_row"]) == int(metrics["skipped"]) == count
    jax.tree.map(
        np.testing.assert_array_equal, (before.params, before.opt), (state.params, state.opt)
    )
    assert int(state.step) == 2

    program = Program(small_config, VOCAB, one_device())
    state = state._replace(params=program.init().params)
    state, metrics = program.step(state, program.put(batch(small_config)))
    assert int(metrics["skipped_in_row"]) == 0
    assert int(metrics["skipped"]) == 2
    assert np.any(np.asarray(state.params["embedding"]) != before.params["embedding"])


def test_all_bfloat16_recipe(small_config):
    """The authors' precision: parameters and moments bf16, depth mixers fp32."""
    config = change(small_config, model={"dtype": "bfloat16", "param_dtype": "bfloat16"})
    state, metrics = after_steps(config, one_device())
    assert state.params["embedding"].dtype == jnp.bfloat16
    assert state.params["residual"]["mlp"]["norm"].dtype == jnp.bfloat16
    assert state.params["residual"]["mlp"]["query"].dtype == jnp.float32
    assert state.opt[1].mu["head"].dtype == state.opt[1].nu["head"].dtype == jnp.bfloat16
    assert np.isfinite(metrics["loss"])


def naive_losses(program, params, ids):
    """-log p of tokens 1.. of each sequence, in NumPy float64 from the model's logits."""
    logits = np.asarray(program.model(params)(ids), np.float64)[:, :-1]
    logits -= logits.max(-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -np.take_along_axis(log_p, ids[:, 1:, None], axis=-1)[..., 0]


def test_heldout_losses_by_definition(small_config):
    config = change(small_config, train={"batch": 16}, run={"eval_batches": 2})
    shards, vocab = open_data(config)
    program = Program(config, vocab, eight_devices())
    params = program.init().params
    losses = heldout_losses(program, params, shards, vocab, config.run.eval_batches)

    stream = np.concatenate(list(shards.heldout.documents()))
    windows = stream[: 32 * 32].reshape(32, 32)
    mean = naive_losses(program, params, windows).mean()
    np.testing.assert_allclose(losses.heldout_loss, mean, rtol=1e-5)

    documents = [d[:32] for d in shards.heldout.documents()]
    assert len(documents) < 16  # so the batch had filler rows
    total = sum(naive_losses(program, params, d[None]).sum() for d in documents)
    authors = total / sum(len(d) for d in documents)
    np.testing.assert_allclose(losses.heldout_loss_authors, authors, rtol=1e-5)

    train = np.concatenate(list(shards.train.documents()))
    counts = np.bincount(train, minlength=vocab) + 1
    unigram = -np.log(counts / counts.sum())[windows[:, 1:]].mean()
    np.testing.assert_allclose(losses.heldout_unigram_loss, unigram, rtol=1e-9)


def test_unigram_yardstick_of_the_embedded_corpus(small_config):
    """6.870 nats a token under the NeoX tokenizer, measured elsewhere with another smoothing."""
    from depthjax.train.evaluate import unigram_loss

    config = change(small_config, data={"tokenizer": "neox"})
    shards, vocab = open_data(config)
    assert vocab == 50280
    assert abs(unigram_loss(config, shards, vocab) - 6.870) < 0.15
