"""The scan over depth has a backward pass of its own: it gives the gradients that JAX derives from
the unrolled loop, whatever it keeps, and in pieces as well as whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from depthjax.models import Remat, Shape, Transformer
from depthjax.models.sublayers import LayerParams, Sublayers
from depthjax.models.vjp import scan_layers
from depthjax.residuals import REGISTRY, BlockAttnRes, FullAttnRes
from depthjax.train import loss

pytestmark = pytest.mark.jax_version

LAYERS = 5  # so that groups of two are ragged, and blocks of three sublayers too
SHAPE = Shape(layers=LAYERS, width=16, heads=2, kv_heads=1, mlp_width=24)
RULES = {
    "pre_ln": REGISTRY["pre_ln"](),
    "hc": REGISTRY["hc"](),
    "moda": REGISTRY["moda"](),
    "block of 3": BlockAttnRes(block_size_sublayers=3),
    "full": FullAttnRes(),
    "full with options": FullAttnRes(bias=True, logit_scale=True),
}


def rules(*names):
    return pytest.mark.parametrize("rule", [RULES[name] for name in names], ids=names)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def build(rule, **options) -> Transformer:
    """A model of random float64 parameters, also those that start at zero or one."""
    model = Transformer(SHAPE, 31, rule, dtype=jnp.float64, rngs=nnx.Rngs(0), **options)
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [
        leaf + 0.3 * jax.random.normal(key, leaf.shape, jnp.float64)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return nnx.merge(graph, jax.tree.unflatten(tree, noisy))


def ids():
    return jax.random.randint(jax.random.key(9), (2, 6), 0, 31)


def gradients(model, meters=None, observer=None):
    """(loss, gradient, gradient of the meters, what was observed)."""
    graph, params = nnx.split(model)

    def objective(params, meters):
        merged = nnx.merge(graph, params)
        return loss.mean_loss(merged, ids(), meters=meters, observer=observer)

    compute = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))
    (value, seen), (gradient, readings) = compute(params, meters)
    return value, nnx.to_pure_dict(gradient), readings, seen


def assert_same(actual, expected, rtol=1e-10):
    def check(path, a, b):
        worst, bound = np.max(np.abs(a - b)), rtol * np.max(np.abs(b)) + 1e-15
        assert worst <= bound, f"{jax.tree_util.keystr(path)}: off by {worst}, allowed {bound}"

    jax.tree_util.tree_map_with_path(check, actual, expected)


@rules("block of 3")
def test_every_policy_gives_the_gradients_of_the_unrolled_loop(rule):
    check_every_policy(rule)


@pytest.mark.proof
@rules("pre_ln", "hc", "moda", "full", "full with options")
def test_every_policy_gives_the_gradients_of_other_unrolled_loops(rule):
    check_every_policy(rule)


def check_every_policy(rule):
    expected = gradients(build(rule, unroll=True))
    for policy in ("none", "dots", "sublayer", "layer", "group"):
        assert_same(gradients(build(rule, remat=Remat(policy, 2))), expected)


@rules("hc", "full")
def test_meters_and_observers_are_those_of_the_unrolled_loop(rule):
    def observer(rule, params, carry, history, s):
        return jnp.mean(rule.stream(carry) ** 2)

    meters = jnp.zeros((LAYERS, 2))
    expected = gradients(build(rule, unroll=True), meters, observer)
    actual = gradients(build(rule, remat=Remat("layer")), meters, observer)
    assert_same(actual[:2] + actual[3:], expected[:2] + expected[3:])
    assert_same(actual[2], expected[2], rtol=1e-5)  # meters are fp32


def layer_params(model):
    """The layers of a model as `scan_layers` takes them, and their functions."""
    rule, residual = model.residual.rule, model.residual.layered()
    graphs, params = zip(nnx.split(model.attention), nnx.split(model.mlp), strict=True)
    branches = tuple(lambda p, x, ctx, g=g: nnx.merge(g, p)(x, ctx) for g in graphs)
    return Sublayers(rule, branches), LayerParams.stacked(residual, params)


@rules("moda", "block of 3")
def test_stages_in_a_row_are_the_whole(rule):
    """Layers 0-2, 2-3 and 3-5 one after the other, each with a traced offset as a pipeline stage
    has it; the second cut is inside a block."""
    sublayers, params = layer_params(build(rule))
    embedding = jax.random.normal(jax.random.key(2), (2, 6, SHAPE.width), jnp.float64)

    def features(params, embedding, cuts):
        state, start = sublayers.rule.begin(embedding, LAYERS), 0
        for end, offset in zip((2, 3, LAYERS) if len(cuts) > 1 else (LAYERS,), cuts, strict=True):
            part = jax.tree.map(lambda p: p[start:end], params)  # noqa: B023
            state, _ = scan_layers(sublayers, part, state, offset, Remat("layer"))
            start = end
        carry, history = state
        live = sublayers.rule.stream(carry)
        return jnp.sum(live**2) + sum(jnp.sum(jnp.sin(rows)) for rows in jax.tree.leaves(history))

    compute = jax.jit(jax.value_and_grad(features, argnums=(0, 1)))
    whole = compute(params, embedding, (jnp.int32(0),))
    pieces = compute(params, embedding, (jnp.int32(0), jnp.int32(2), jnp.int32(3)))
    assert_same(pieces, whole)
