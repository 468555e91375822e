"""Diagnostics whose answers are known without running them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from depthjax import probes
from depthjax.errors import InputError
from depthjax.models import Shape, Transformer
from depthjax.probes import losses
from depthjax.probes.mixing import semiseparable_rank
from depthjax.residuals import HC, BlockAttnRes, FullAttnRes, MHCStatic, PreLN

pytestmark = pytest.mark.jax_version

SHAPE = Shape(layers=3, width=16, heads=2, kv_heads=2, mlp_width=24)
READERS = 2 * SHAPE.layers + 1
VOCAB = 31
IDS = np.random.default_rng(0).integers(0, VOCAB, (5, 9))


def model_of(rule) -> Transformer:
    """With branches that are large enough to matter."""
    return Transformer(SHAPE, VOCAB, rule, init_std=0.3, rngs=nnx.Rngs(0))


@functools.cache
def plain() -> Transformer:
    return model_of(PreLN())


def changed(model, change) -> Transformer:
    """A copy with change(path, parameter) in place of each parameter."""
    graph, state = nnx.split(model)
    paths, tree = jax.tree_util.tree_flatten_with_path(state)
    new = [change(jax.tree_util.keystr(path), leaf) for path, leaf in paths]
    return nnx.merge(graph, jax.tree.unflatten(tree, new))


def test_exchanging_identical_layers_changes_nothing_and_compiles_once():
    def repeat_layer(path, leaf):
        per_layer = leaf.shape[:1] == (SHAPE.layers,)
        return leaf.at[2].set(leaf[1]) if per_layer else leaf

    compiled = losses._swapped_loss._cache_size()
    score = probes.permutation_score(changed(plain(), repeat_layer), IDS)
    assert losses._swapped_loss._cache_size() == compiled + 1
    assert score[1, 2] == 0
    assert score[0, 1] > 1e-3
    assert np.all(np.isnan(score[np.tril_indices(SHAPE.layers)]))


def test_a_layer_that_writes_nothing_is_not_missed():
    def silence(path, leaf):
        return leaf.at[1].set(0) if "'out'" in path or "'down'" in path else leaf

    silent = changed(plain(), silence)
    pruned = probes.diagnostics.diagnose("layer_pruning_loss", silent, IDS)
    assert pruned["delta"][1] == 0
    assert np.all(np.abs(pruned["delta"][[0, 2]]) > 1e-3)
    score = probes.causal_score(silent, IDS)
    assert score[1, 2] == 0
    assert score[0, 2] > 1e-3
    distance = probes.angular_distance(silent, IDS)
    assert distance[1, 2] == 0
    assert distance[0, 1] > 1e-2


def test_identity_transports_keep_all_streams_apart():
    """HC starts with them."""
    found = probes.transport_effective_rank(model_of(HC()), IDS)
    np.testing.assert_allclose(found["effective_rank"], 4, rtol=1e-6)
    np.testing.assert_allclose(found["singular_values"], 1, rtol=1e-6)
    np.testing.assert_array_equal(found["stream_cosine"], 0)


def test_the_lens_at_the_end_is_the_model():
    cross_entropy, kl, overlap = probes.logit_lens(plain(), IDS).T
    assert kl[-1] == 0
    assert overlap[-1] == 1
    assert np.all(kl[:-1] > 1e-3)
    log_p = jax.nn.log_softmax(plain()(jnp.asarray(IDS))[:, :-1])
    expected = -np.mean(np.take_along_axis(np.asarray(log_p), IDS[:, 1:, None], -1))
    np.testing.assert_allclose(cross_entropy[-1], expected, rtol=1e-5)


def test_the_plain_stream_reads_all_that_came_before_alike():
    found = probes.mixing_matrix(plain(), IDS)
    triangle = np.tril(np.ones((READERS, READERS)))
    np.testing.assert_allclose(np.nan_to_num(found["matrix"]), triangle, atol=1e-5)
    assert np.array_equal(np.isnan(found["matrix"]), triangle == 0)
    assert found["rank"] == READERS
    assert found["semiseparable_rank"] == 1
    seen = np.arange(1, READERS + 1)
    np.testing.assert_allclose(found["entropy"], np.log(seen), atol=1e-5)
    np.testing.assert_allclose(found["look_back"], (seen + 1) / 2, rtol=1e-5)
    np.testing.assert_allclose(found["embedding_weight"], 1 / seen, rtol=1e-5)


def test_streams_are_semiseparable_of_their_number():
    """arXiv 2603.15031: m streams mix depth by an m-semiseparable matrix."""

    def noisy(path, leaf):
        noise = jax.random.normal(jax.random.key(len(path)), leaf.shape)
        return leaf + 3 * noise if "_logits" in path else leaf

    found = probes.mixing_matrix(changed(model_of(MHCStatic(streams=2)), noisy), IDS)
    assert found["semiseparable_rank"] == 2


def test_semiseparable_rank_of_a_dense_triangle():
    """Its largest block, which has random entries, is of full rank."""
    dense = np.tril(np.random.default_rng(0).normal(size=(7, 7)))
    assert semiseparable_rank(dense) == 4
    assert semiseparable_rank(np.tril(np.outer(np.arange(1, 8), np.ones(7)))) == 1


@pytest.mark.parametrize("rule", [FullAttnRes(), BlockAttnRes(block_size_sublayers=3)])
def test_without_queries_sources_weigh_the_same(rule):
    """As they start. Members of a block share the weight of their sum."""
    model = model_of(rule)
    weights = probes.path_weights(model, IDS)
    newest = probes.newest_source_weight(model, IDS)
    block = model.residual.rule.block
    for reader in range(1, 2 * SHAPE.layers):
        sources = 1 + math.ceil(reader / block)
        np.testing.assert_allclose(weights[: reader + 1, reader], 1 / sources, rtol=1e-5)
        np.testing.assert_allclose(newest[reader - 1], 1 / sources, rtol=1e-5)
        assert np.all(np.isnan(weights[reader + 1 :, reader]))


@pytest.mark.parametrize(
    "diagnostic", ["angular_distance", "usefulness", "transport_effective_rank"]
)
def test_micro_batches_and_devices_change_no_number(diagnostic):
    """Five windows: on one device 4 and 1 of them; then one on each of eight devices, under a mesh,
    or with parameters laid over one."""
    model = model_of(HC())
    alone = probes.diagnostics.diagnose(diagnostic, model, IDS)
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    if diagnostic == "usefulness":
        graph, state = nnx.split(model)
        model = nnx.merge(graph, jax.device_put(state, NamedSharding(mesh, P())))
        shared = probes.diagnostics.diagnose(diagnostic, model, IDS, micro_batch=1)
    else:
        with jax.set_mesh(mesh):
            shared = probes.diagnostics.diagnose(diagnostic, model, IDS, micro_batch=1)
    for name in alone:
        np.testing.assert_allclose(shared[name], alone[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_magnitudes_of_the_embedding_and_of_an_unread_output():
    found = probes.magnitudes(plain(), IDS)
    embedded = plain().embedding[...][IDS]
    np.testing.assert_allclose(found["output_rms"][0], jnp.sqrt(jnp.mean(embedded**2)), rtol=1e-6)
    blind = changed(plain(), lambda path, leaf: leaf * 0 if "head" in path else leaf)
    silent = probes.magnitudes(blind, IDS)
    np.testing.assert_array_equal(silent["gradient_rms"], 0)
    np.testing.assert_allclose(silent["loss"], np.log(VOCAB), rtol=1e-6)


def test_what_does_not_apply_says_why():
    with pytest.raises(probes.NotApplicable, match="usefulness does not apply to full_attnres: "):
        probes.usefulness(model_of(FullAttnRes()), IDS)
    with pytest.raises(probes.NotApplicable, match="does not apply to pre_ln: it has a single str"):
        probes.transport_effective_rank(plain(), IDS)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (IDS.astype(float), "input_ids is float64 of shape"),
        (IDS[:, :1], r"input_ids has shape \(5, 1\)"),
        (IDS + VOCAB, "the model knows ids 0 to 30"),
    ],
)
def test_windows_that_do_not_fit_are_refused(ids, message):
    with pytest.raises(InputError, match=message):
        probes.angular_distance(plain(), ids)


def test_an_unknown_swap_is_refused():
    with pytest.raises(InputError, match="swap is 'half'"):
        probes.permutation_score(plain(), IDS, swap="half")
