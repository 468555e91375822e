"""The ablations of the depth mixture against a spelling that takes the sources one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from depthjax.kernels import MixtureRule, depth_mix, depth_weights
from depthjax.kernels.mixture import tiles

EPS = 1e-3
RULES = [
    MixtureRule(),
    MixtureRule(scores="sigmoid"),
    MixtureRule(keys="raw"),
    MixtureRule(window=2),
    MixtureRule("sigmoid", "raw", window=1),
]


@pytest.fixture
def interpreted(monkeypatch):
    """A read of what no copy has brought yet is an error (JAX 0.12) or a NaN."""
    monkeypatch.setattr(tiles, "GROUPS", (2, 1))
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
    pltpu.reset_tpu_interpret_mode_state()


def naive(sources, query, bias, rule):
    """(weights by source, mixture) of a list of sources [T, D] by age, of which all are live."""
    logits = []
    for i, v in enumerate(sources):
        key = v / jnp.sqrt(jnp.mean(v * v, -1, keepdims=True) + EPS) if "n" in rule.keys[0] else v
        logit = jnp.zeros(v.shape[:-1]) if query is None else key @ query
        logit = logit if bias is None else logit + bias[i]
        outside = rule.window is not None and 0 < i < len(sources) - rule.window
        logits.append(jnp.full_like(logit, -jnp.inf) if outside else logit)
    if rule.scores == "sigmoid":
        weights = [1 / (1 + jnp.exp(-e)) for e in logits]
    else:
        most = jnp.max(jnp.stack(logits), 0)
        total = sum(jnp.exp(e - most) for e in logits)
        weights = [jnp.exp(e - most) / total for e in logits]
    return weights, sum(w[:, None] * v for w, v in zip(weights, sources, strict=True))


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(mix, arrays):
    return jax.value_and_grad(lambda *given: jnp.sum(jnp.sin(mix(*given))), (0, 1, 2))(*arrays)


def draw(rows, tokens, width, dtype=jnp.float64, size=1.0):
    shapes = (rows, tokens, width), (tokens, width), (width,)
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]
    return [size * arrays[0], size * arrays[1], arrays[2] * 0.3]


def assert_close(bound, actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.max(np.abs(a - b)) <= bound * np.max(np.abs(b), initial=1e-30)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_in_float64(rule):
    """With a buffer of which four rows are live, one more source and biases."""
    with jax.enable_x64(True):
        arrays, bias = draw(6, 3, 8), jnp.linspace(-1, 1, 7)

        def plain(rows, newest, query):
            return naive([*rows[:4], newest], query, bias, rule)

        options = {"count": 4, "bias": bias, "eps": EPS, "rule": rule}

        def mixed(rows, newest, query):
            return depth_mix(rows, query, newest=newest, **options)

        expected = value_and_gradients(lambda *given: plain(*given)[1], arrays)
        assert_close(1e-13, value_and_gradients(mixed, arrays), expected)
        rows, newest, query = arrays
        weights = depth_weights(rows, query, newest=newest, **options)
        assert weights.dtype == jnp.float64 and not weights[4:6].any()
        assert_close(1e-13, list(weights[jnp.array([0, 1, 2, 3, 6])]), plain(*arrays)[0])


@pytest.mark.parametrize("rule", RULES[:2])
def test_mixing_that_no_input_changes(rule):
    """Without a query, the biases are the logits."""
    with jax.enable_x64(True):
        (rows, _, _), bias = draw(4, 3, 8), jnp.linspace(-1, 1, 4)

        def plain(rows, bias, _):
            return naive(list(rows), None, bias, rule)[1]

        def mixed(rows, bias, _):
            return depth_mix(rows, None, bias=bias, rule=rule)

        expected, actual = (value_and_gradients(f, (rows, bias, 0.0)) for f in (plain, mixed))
        assert_close(1e-13, actual, expected)
        assert depth_weights(rows, None, bias=bias, rule=rule).shape == (4, 3)


@pytest.mark.jax_version
@pytest.mark.parametrize(
    ("rule", "count", "precision", "size"),
    [
        (RULES[1], 4, (jnp.float32, 1e-5), 1.0),
        (MixtureRule(keys="raw", window=3), 5, (jnp.float32, 1e-5), 1e-2),
        (RULES[4], 5, (jnp.bfloat16, 2e-2), 1.0),
        (MixtureRule("sigmoid", window=9), 2, (jnp.float32, 1e-5), 100.0),
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_the_tpu_kernels(rule, count, precision, size):
    """Values and gradients, with the RMSNorm behind. Rows that are not seen hold NaN."""
    dtype, bound = precision
    arrays = draw(5, 5, 72, jnp.float32, size)
    arrays = [x.astype(dtype) for x in arrays[:2]] + arrays[2:]

    def plain(rows, newest, query):
        z = naive([*rows[:count], newest], query, None, rule)[1]
        return z / jnp.sqrt(jnp.mean(z * z, -1, keepdims=True) + EPS)

    def kernel(count, rows, newest, query):
        given = {"count": count, "newest": newest, "eps": EPS, "rule": rule}
        scale = jnp.ones_like(query)
        return depth_mix(
            rows, query, **given, output_scale=scale, implementation="mosaic_tpu"
        ).astype(jnp.float32)

    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        expected = value_and_gradients(plain, wide)
    unseen = ~rule.seen(5, count, newest=True)[:, None, None]
    arrays[0] = jnp.where(unseen, jnp.nan, arrays[0])

    @jax.jit
    def run(count, arrays):
        return value_and_gradients(lambda *given: kernel(count, *given), arrays)

    assert_close(bound, run(count, arrays), expected)


@pytest.mark.usefixtures("interpreted")
def test_the_tpu_kernels_on_all_rows():
    """Without a count and a newest source, the rows outside the window have cotangents of zero."""
    rows, _, query = draw(5, 5, 72, jnp.float32)
    rule = MixtureRule("sigmoid", window=2)

    def gradients(implementation):
        def mix(rows, query):
            options = {"rule": rule, "implementation": implementation}
            return jnp.sum(jnp.sin(depth_mix(rows, query, **options)))

        return jax.value_and_grad(mix, (0, 1))(rows, query)

    actual = jax.jit(gradients, static_argnums=0)("mosaic_tpu")
    assert_close(1e-5, actual, gradients("xla"))
    assert not actual[1][0][1:3].any()


@pytest.mark.parametrize("form", ["xla", "mosaic_tpu"])
def test_the_backward_pass_keeps_no_copy_of_the_sources(form):
    sources, query = jnp.ones((5, 6, 32), jnp.bfloat16), jnp.ones(32)

    def mix(sources, query):
        options = {"count": 3, "output_scale": query, "implementation": form}
        return depth_mix(sources, query, **options)

    pull = jax.eval_shape(lambda *given: jax.vjp(mix, *given)[1], sources, query)
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull))
    assert kept < sources.nbytes + 6 * 32 * 2


def test_what_there_is_not():
    rows, query = jnp.zeros((3, 2, 8)), jnp.zeros(8)
    with pytest.raises(ValueError, match=r"^scores is 'hard': give one of"):
        depth_mix(rows, query, rule=MixtureRule("hard"))
    with pytest.raises(ValueError, match=r"^window is 0: give"):
        depth_weights(rows, query, rule=MixtureRule(window=0))
    with pytest.raises(ValueError, match=r"^query is None: give bias \[N\]"):
        depth_mix(rows, None)
