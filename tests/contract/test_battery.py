"""The contract: one list of properties that every registered residual connection keeps."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from naive import NAIVE

from depthjax.models import Remat, Shape, Transformer
from depthjax.parallel import parameter_shardings, row_sharding
from depthjax.plan import forward_flops_per_token
from depthjax.residuals import (
    KINDS,
    REGISTRY,
    BlockAttnRes,
    DepthMuP,
    FullAttnRes,
    ResidualModule,
    append,
    apply_branches,
)
from depthjax.train import loss

SHAPE = Shape(layers=2, width=32, heads=4, kv_heads=2, mlp_width=48)
VOCAB = 61

# Every variant with its defaults, whatever is registered.
RULES = {name: make() for name, make in REGISTRY.items()}

# Their other forms: block sizes that are even, and odd and ragged (3 + 1 sublayers); options.
FORMS = {
    **RULES,
    "block_attnres_b2": BlockAttnRes(block_size_sublayers=2),
    "block_attnres_b3": BlockAttnRes(block_size_sublayers=3),
    "full_attnres_scale_bias": FullAttnRes(logit_scale=True, bias=True),
    "block_attnres_topk": BlockAttnRes(block_size_sublayers=1, topk=0.5),
    "depth_mup_width": DepthMuP(base_width=8),
}

# DepthBench, table 6, and for mHC-lite 28 columns instead of 24: parameters beyond Pre-LN (m = 4).
PLAIN = ("pre_ln", "post_ln", "lns", "deepnorm", "depth_mup", "completep")
EXTRA_PARAMETERS = {
    **dict.fromkeys(PLAIN, lambda layers, width: 0),
    "mhc_lite": lambda layers, width: 2 * layers * (4 * 32 * width + 35),
    **dict.fromkeys(("full_attnres", "block_attnres"), lambda layers, width: 4 * layers * width),
    "sandwich_ln": lambda layers, width: 2 * layers * width,
    "keel": lambda layers, width: (2 * layers - 1) * width,
    "hc": lambda layers, width: 2 * layers * (6 * width + 26),
    "mhc": lambda layers, width: 2 * layers * (96 * width + 27),
    "mhc_native": lambda layers, width: 2 * layers * (96 * width + 27),
    "mhc_static": lambda layers, width: 48 * layers,
    **dict.fromkeys(
        ("moda", "post_ln_moda"),
        lambda layers, width: (layers - 1) * 2 * width * SHAPE.kv_heads * SHAPE.head_dim,
    ),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
every_form = pytest.mark.parametrize("rule", FORMS.values(), ids=FORMS)


def build(rule, seed=0, noise=0.3, shape=SHAPE, **options) -> Transformer:
    """A model whose every parameter is random, also those that start at zero or one."""
    model = Transformer(shape, VOCAB, rule, rngs=nnx.Rngs(seed), **options)
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noisy = [
        leaf + noise * jax.random.normal(key, leaf.shape, leaf.dtype) * (1 + jnp.abs(leaf).mean())
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return nnx.merge(graph, jax.tree.unflatten(tree, noisy))


def tokens(batch=2, length=7):
    return jax.random.randint(jax.random.key(9), (batch, length), 0, VOCAB)


def mean_loss(model, ids):
    return loss.mean_loss(model, ids)[0]


def loss_and_gradients(model, ids):
    graph, params = nnx.split(model)

    def loss(params):
        return mean_loss(nnx.merge(graph, params), ids)

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    return value, nnx.to_pure_dict(gradients)


def assert_close(actual, expected, rtol=1e-4, atol=1e-6):
    """Every leaf within rtol of the largest value of the expected leaf."""

    def check(path, a, b):
        if not b.size:  # of a parameter that no layer has
            assert a.shape == b.shape
            return
        bound = rtol * float(jnp.max(jnp.abs(b))) + atol
        worst = float(jnp.max(jnp.abs(a - b)))
        assert worst <= bound, f"{jax.tree_util.keystr(path)}: off by {worst}, allowed {bound}"

    jax.tree_util.tree_map_with_path(check, actual, expected)


def branch_of(model, s):
    """The module of sublayer s, out of the stack of its kind."""
    graph, state = nnx.split(model.mlp if s % 2 else model.attention)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[s // 2], state))


@dataclasses.dataclass
class Branch:
    """One sublayer as a function of its input alone, and the module behind it."""

    layer: nnx.Module

    def __call__(self, x):
        return self.layer(x)[0]


def naive_logits(model, ids):
    """The model's function spelt with the naive residual connection and a loop over layers."""
    embedded = model.embedding[...][ids]
    branches = []
    for s in range(2 * model.shape.layers):
        layer = branch_of(model, s)
        branches.append(Branch(layer))
    rule = model.residual.rule
    if rule.name in NAIVE:
        features = NAIVE[rule.name](rule, model.residual.layered(), branches, embedded)
    else:  # a new variant: its own moves, in a plain loop
        features = apply_branches(rule, model.residual.params(), branches, embedded)
    return features @ model.head[...]


def test_naive_forms_are_of_variants_that_exist():
    assert NAIVE.keys() <= REGISTRY.keys()


def check_against_naive_loop(rule, layers):
    """Loss and all gradients; a hidden cast to fp32 anywhere would leave an error near 1e-7."""
    if hasattr(rule, "sinkhorn_rounds"):  # the naive loop spells them out in every sublayer
        rule = dataclasses.replace(rule, sinkhorn_rounds=4)
    with jax.enable_x64(True):
        shape, ids = dataclasses.replace(SHAPE, layers=layers), tokens()
        model = build(rule, shape=shape, dtype=jnp.float64, param_dtype=jnp.float64)
        graph, params = nnx.split(model)
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)

        def naive(params):
            logits = naive_logits(nnx.merge(graph, params), ids)
            assert logits.dtype == jnp.float64
            log_p = jax.nn.log_softmax(logits[:, :-1])
            return -jnp.mean(jnp.take_along_axis(log_p, ids[:, 1:, None], axis=-1))

        value, gradients = loss_and_gradients(nnx.merge(graph, params), ids)
        expected, expected_gradients = jax.jit(jax.value_and_grad(naive))(params)
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        assert_close(gradients, nnx.to_pure_dict(expected_gradients), rtol=1e-10, atol=1e-14)


@pytest.mark.jax_version
@every_form
def test_scan_equals_naive_loop_in_float64(rule):
    check_against_naive_loop(rule, SHAPE.layers)


@pytest.mark.parametrize("name", ["full_attnres", "keel", "moda"])
def test_a_single_layer_equals_the_naive_loop(name):
    """Of variants with parameters that the first layer, or the last, does not have."""
    check_against_naive_loop(RULES[name], 1)


@pytest.mark.proof
@every_form
def test_scan_equals_naive_loop_of_six_layers(rule):
    check_against_naive_loop(rule, 6)


@pytest.mark.jax_version
@every_rule
def test_scan_equals_unrolled_and_rematerialised(rule):
    ids = tokens()
    value, gradients = loss_and_gradients(build(rule), ids)
    for options in ({"unroll": True}, {"remat": Remat("layer")}):
        other, other_gradients = loss_and_gradients(build(rule, **options), ids)
        np.testing.assert_allclose(value, other, rtol=1e-6)
        assert_close(other_gradients, gradients)


@every_form
def test_bfloat16_is_close_to_float32_at_32_layers(rule):
    """Loss in fp32 and within 1e-2, gradients finite."""
    shape, ids = dataclasses.replace(SHAPE, layers=32), tokens()
    expected = jax.jit(mean_loss)(build(rule, noise=0.03, shape=shape), ids)
    narrow = build(rule, noise=0.03, shape=shape, dtype=jnp.bfloat16)
    value, gradients = loss_and_gradients(narrow, ids)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, expected, rtol=0, atol=1e-2)
    assert all(jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(gradients))


@pytest.mark.jax_version
@every_rule
def test_traces_once_for_all_depth_indices(rule):
    """Skipped and swapped layers are traced indices: a probe over all of them compiles once."""
    model, traces = build(rule), []

    @jax.jit
    def probe(ids, skip, i, j):
        traces.append(1)
        return model(ids, skip=skip, swap=(i, j))

    plain = model(tokens())
    for index in (0, 1):
        assert jnp.any(probe(tokens(), index, index, 1) != plain)
    assert len(traces) == 1


@every_form
def test_swapping_twice_or_a_layer_with_itself_changes_nothing(rule):
    model, ids = build(rule), tokens()
    params = model.residual.layered()
    swapped = model.residual.rule.swap(params, 0, 1)
    assert_close(model.residual.rule.swap(swapped, 0, 1), params, rtol=0, atol=0)
    np.testing.assert_array_equal(model(ids, swap=(1, 1)), model(ids))


@pytest.mark.jax_version
@every_rule
def test_sharded_equals_single_device(rule):
    """Batch, parameters, heads and tokens divided, each over its axes of one mesh."""
    model, ids = build(rule), tokens(batch=8, length=8)
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3)
    value, gradients = loss_and_gradients(model, ids)
    graph, params = nnx.split(model)
    placed = jax.device_put(nnx.to_pure_dict(params), parameter_shardings(params, mesh))
    nnx.replace_by_pure_dict(params, placed)
    with jax.set_mesh(mesh):
        ids = jax.device_put(ids, row_sharding(mesh))
        other, other_gradients = loss_and_gradients(nnx.merge(graph, params), ids)
    np.testing.assert_allclose(value, other, rtol=1e-5)
    assert_close(other_gradients, gradients)


@every_form
def test_dead_history_rows_are_never_seen(rule):
    """Rows beyond a reader's count may hold NaN: outputs and gradients do not change."""
    model = build(rule)
    module, width = model.residual, SHAPE.width

    def run(x, poison):
        carry, history = module.begin(x)
        history = jax.tree.map(lambda buffer: jnp.full_like(buffer, poison), history)
        for s in range(2 * SHAPE.layers):
            u, ctx, (carry, history) = module.read((carry, history), s)
            y, aux = branch_of(model, s)(u, ctx)
            carry, history = module.write((carry, history), y, s, aux)
        return jnp.sum(module.finish((carry, history)) ** 2 * jnp.arange(width))

    x = jax.random.normal(jax.random.key(1), (1, 3, width))
    clean = jax.value_and_grad(run)(x, 0.0)
    poisoned = jax.value_and_grad(run)(x, jnp.nan)
    jax.tree.map(np.testing.assert_array_equal, clean, poisoned)


@every_form
def test_history_rows_are_written_once(rule):
    model = build(rule)
    module = model.residual
    carry, history = module.begin(jax.random.normal(jax.random.key(1), (1, 3, SHAPE.width)))
    written = set()
    for s in range(2 * SHAPE.layers):
        assert written == set(range(module.rule.rows_before(s)))
        x, ctx, carry, history = module.rule.read(module.sublayer_params(s), carry, history, s)
        y, aux = branch_of(model, s)(x, ctx)
        carry, appended = module.rule.write(module.sublayer_params(s), carry, y, aux, s)
        history = append(history, appended)
        if appended is not None and appended[2]:
            assert int(appended[1]) not in written
            assert module.rule.appends(s % 2)
            written.add(int(appended[1]))
    assert written == set(range(jax.tree.leaves(history)[0].shape[0] if written else 0))


@every_form
def test_declared_parameters_are_those_stored(rule):
    """Rows that a layer lacks are not stored; the padded form adds zeros in front of them only."""
    rule = rule.bind(SHAPE.layers, (SHAPE.kv_heads, SHAPE.head_dim))
    module = ResidualModule(rule, layers=SHAPE.layers, width=SHAPE.width, rngs=nnx.Rngs(0))
    declared = rule.parameters(SHAPE.layers, SHAPE.width)
    for kind in KINDS:
        for name, parameter in declared[kind].items():
            stored = getattr(module, kind)[name][...]
            first, last = parameter.first_layer, SHAPE.layers - parameter.missing_last
            assert stored.shape == (last - first, *parameter.shape)
            padded = module.layered()[kind][name]
            assert padded.shape == (SHAPE.layers, *parameter.shape)
            np.testing.assert_array_equal(padded[first:last], stored)
            assert not padded[:first].any()
            assert not padded[last:].any()
    assert declared["final"].keys() == module.final.keys()


@every_form
def test_flops_are_the_compilers(rule):
    """Counted on a program without loops, whose whole cost XLA knows; its norms, softmax and
    rotations are in no formula, hence the one-sided tolerance."""
    shape = Shape(layers=3, width=256, heads=4, kv_heads=2, mlp_width=768)
    model = Transformer(shape, 512, rule, unroll=True, rngs=nnx.Rngs(0))
    batch, context = 2, 128
    graph, params = nnx.split(model)
    ids = jax.ShapeDtypeStruct((batch, context), jnp.int32)
    compiled = jax.jit(lambda p, ids: nnx.merge(graph, p)(ids)).lower(params, ids).compile()
    counted = compiled.cost_analysis()["flops"] / (batch * context)
    formula = forward_flops_per_token(shape, 512, context, model.residual.rule, causal=False)
    assert 0.97 < formula / counted <= 1.001


@every_form
def test_paths_rebuild_every_read(rule):
    """Each branch input is, but for norms, the sum of the embedding and the earlier outputs with
    the weights that `paths` states. Norm scales are 1 here, or no number a source would do; means
    are left out, as by LayerNorm."""
    model = build(rule)
    module = model.residual
    for kind in (*KINDS, "final"):
        for name, scale in getattr(module, kind).items():
            if name.endswith("norm"):
                scale[...] = jnp.ones_like(scale[...])
    sources = [jax.random.normal(jax.random.key(1), (1, 3, SHAPE.width))]
    before = module.begin(sources[0])
    slots = module.rule.slots(SHAPE.layers)[:, None]  # [K, sources so far]

    def direction(x):
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def check(paths, x):
        weights = jnp.einsum("...k,...kn->...n", paths.read, slots)
        rebuilt = jnp.einsum("...n,n...d->...d", weights, jnp.stack(sources))
        np.testing.assert_allclose(direction(rebuilt), direction(x), atol=2e-4)

    for s in range(2 * SHAPE.layers):
        params = module.sublayer_params(s)
        x, ctx, read = module.read(before, s)
        y, aux = branch_of(model, s)(x, ctx)
        after = module.write(read, y, s, aux)
        paths = module.rule.paths(params, before, y, after, s)
        check(paths, x)
        kept = jnp.einsum("...tk,...kn->...tn", paths.keep, slots)
        written = jnp.broadcast_to(paths.write[..., None], (*kept.shape[:-1], 1))
        slots, sources = jnp.concatenate([kept, written], axis=-1), [*sources, y]
        before = after
    check(
        module.rule.paths(module.params()["final"], before, None, None, None), module.finish(before)
    )


@pytest.mark.jax_version
@every_rule
def test_usable_in_a_python_loop(rule):
    """ResidualModule's own moves, one Python call each, are the scan."""
    model, ids = build(rule), tokens()
    state = model.residual.begin(model.embedding[...][ids])
    for s in range(2 * SHAPE.layers):
        x, ctx, state = model.residual.read(state, s)
        y, aux = branch_of(model, s)(x, ctx)
        state = model.residual.write(state, y, s, aux)
    assert_close(model.logits(model.residual.finish(state)), model(ids))


@every_rule
def test_rule_is_hashable_and_frozen(rule):
    assert hash(rule) == hash(dataclasses.replace(rule))
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.eps = 1.0


@pytest.mark.parametrize("name", EXTRA_PARAMETERS)
def test_parameter_count_is_the_formula(name):
    """(2 L + 1) D norm scales, and what DepthBench, table 6, lists beyond Pre-LN."""
    model, layers, width = build(REGISTRY[name]()), SHAPE.layers, SHAPE.width
    counted = sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model.residual)))
    assert counted == (2 * layers + 1) * width + EXTRA_PARAMETERS[name](layers, width)
