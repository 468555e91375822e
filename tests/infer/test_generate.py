"""Generation: what it draws, when it ends, and that it is the plain loop over the full forward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from depthjax.errors import InputError
from depthjax.infer import Sampling, generate, in_activation_dtype, sample, stream
from depthjax.infer.generate import _next
from depthjax.models import Shape, Transformer
from depthjax.residuals import BlockAttnRes

pytestmark = pytest.mark.jax_version

SHAPE = Shape(layers=2, width=32, heads=4, kv_heads=2, mlp_width=48)
VOCAB = 61
GREEDY = Sampling(temperature=0)
PROMPTS = [[5], [7, 3, 9, 2], [1, 2]]


@pytest.fixture(scope="module")
def model():
    rule = BlockAttnRes(block_size_sublayers=3)
    return Transformer(SHAPE, VOCAB, rule, init_std=0.3, rngs=nnx.Rngs(0))


def test_greedy_is_the_argmax_of_the_full_forward(model):
    found = generate(model, PROMPTS, 4, GREEDY)
    full = jax.jit(lambda ids: model(ids))
    for prompt, row in zip(PROMPTS, found, strict=True):
        logits = full(jnp.array([[*prompt, *row] + [0] * (4 - len(prompt))]))[0]
        expected = jnp.argmax(logits[len(prompt) - 1 : len(prompt) + 3], axis=-1)
        np.testing.assert_array_equal(row, expected)


def test_a_seed_says_what_is_drawn_and_one_program_draws_it(model):
    _next.clear_cache()
    one = generate(model, PROMPTS, 8, seed=1)
    np.testing.assert_array_equal(one, generate(model, PROMPTS, 8, seed=1))
    assert not np.array_equal(one, generate(model, PROMPTS, 8, seed=2))
    assert _next._cache_size() == 1


def test_a_stop_ends_a_row_and_all_stopped_end_the_run(model):
    whole = generate(model, PROMPTS, 6, GREEDY)
    stop = int(whole[1][2])
    for row, cut in zip(whole, generate(model, PROMPTS, 6, GREEDY, stop=stop), strict=True):
        end = np.flatnonzero(row == stop)
        np.testing.assert_array_equal(cut, row[: end[0]] if len(end) else row)
    assert [len(row) for row in generate(model, PROMPTS, 0)] == [0, 0, 0]


def test_rows_do_not_see_each_other(model):
    together = generate(model, PROMPTS, 5, GREEDY)
    alone = generate(model, PROMPTS[:1], 5, GREEDY)
    np.testing.assert_array_equal(together[0], alone[0])


def test_what_may_be_drawn():
    p = jnp.array([[0.1, 0.4, 0.3, 0.2]])
    keys = jax.random.split(jax.random.key(0), 200)

    def drawn(**options):
        sampling = Sampling(**options)
        ids = jax.jit(jax.vmap(lambda key: sample(jnp.log(p), key, sampling)))(keys)
        return set(ids.ravel().tolist())

    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {1, 2}
    assert drawn(top_k=9) == {0, 1, 2, 3}
    assert drawn(top_p=0.65) == {1, 2}
    assert drawn(top_p=0.3) == {1}
    assert drawn(top_k=3, top_p=0.7) == {1, 2}  # of 4/9, 3/9 and 2/9
    assert drawn(temperature=0) == drawn(temperature=0.01) == {1}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_wrong_sampling_is_one_sentence(options, words):
    with pytest.raises(InputError, match=words):
        Sampling(**options)


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(InputError, match="a prompt is empty"):
        next(stream(model, [[1], []], 1))


def test_matrices_in_the_activations_dtype_change_nothing():
    rule = BlockAttnRes(block_size_sublayers=3)
    model = Transformer(SHAPE, VOCAB, rule, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    narrow = in_activation_dtype(model)
    for path, x in nnx.to_flat_state(nnx.state(narrow)):
        assert x.dtype == (jnp.float32 if path[0] == "residual" else jnp.bfloat16), path
    ids = jnp.array([[3, 1, 4, 1, 5]])
    forward = jax.jit(lambda model, ids: model(ids))
    np.testing.assert_array_equal(forward(narrow, ids), forward(model, ids))
    assert model.head.dtype == jnp.float32
