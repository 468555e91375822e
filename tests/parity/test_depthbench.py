"""Equality with numbers that the DepthBench authors' code produced (README.md beside this file)."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from depthjax.errors import InputError
from depthjax.interop import from_depthbench
from depthjax.interop.depthbench import _names
from depthjax.train.loss import next_token_losses

pytestmark = pytest.mark.jax_version

FOLDER = pathlib.Path(__file__).parent
CASES = sorted(path.stem for path in FOLDER.glob("*.safetensors"))
every_case = pytest.mark.parametrize("case", CASES)


@functools.cache
def load(case):
    """(tensors, config, model) of a fixture."""
    tensors = load_file(FOLDER / f"{case}.safetensors")
    config = json.loads((FOLDER / f"{case}.json").read_text())
    return tensors, config, from_depthbench(tensors, config)


def mean_loss(model, ids, **options):
    return jnp.mean(next_token_losses(model, ids, **options)[0])


def test_all_fixtures_are_here():
    blocks = {"attnres_block_b3", "attnres_block_b4", "attnres_block_b5_uneven"}
    assert set(CASES) == {"preln", "preln_gqa", "attnres_full"} | blocks


@every_case
def test_logits_and_loss(case):
    tensors, config, model = load(case)
    ids = tensors["input_ids"].astype(np.int32)
    logits = jax.jit(model)(ids)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, tensors["logits"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(mean_loss(model, ids), tensors["loss"], rtol=0, atol=1e-5)
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert parameters == config["n_params"]


@every_case
def test_gradients(case):
    tensors, _, model = load(case)
    ids = tensors["input_ids"].astype(np.int32)
    graph, params = nnx.split(model)
    gradients = jax.jit(jax.grad(lambda p: mean_loss(nnx.merge(graph, p), ids)))(params)
    ours = nnx.to_flat_state(gradients)
    names = _names(model.shape, model.residual.rule)
    compared = 0
    for path, leaf in ours:
        theirs = names["/".join(path)]
        stacked = "{}" in theirs.name
        for i in range(theirs.first_layer, model.shape.layers) if stacked else [None]:
            name = f"grad.{theirs.name.format(i)}"
            if name in tensors:
                gradient = leaf[...][i - theirs.first_layer] if stacked else leaf[...]
                reference = theirs.layout(tensors[name])
                atol = max(1e-6, 3e-5 * np.abs(reference).max())
                np.testing.assert_allclose(gradient, reference, rtol=2e-3, atol=atol, err_msg=name)
                compared += 1
    assert compared == sum(name.startswith("grad.") for name in tensors) > 0


@every_case
def test_depth_states_and_weights(case):
    tensors, _, model = load(case)
    ids = tensors["input_ids"].astype(np.int32)

    def observer(rule, params, carry, history, s):
        return {"hidden": rule.stream(carry), **rule.observe(params, carry, history, s)}

    _, seen = jax.jit(lambda ids: model.features(ids, observer=observer))(ids)
    for layer in range(model.shape.layers + 1):
        reference = tensors[f"hidden.{layer}"]
        np.testing.assert_allclose(seen["hidden"][2 * layer], reference, rtol=0, atol=1e-4)
    mixtures = sorted(name for name in tensors if name.startswith("attnres.weights."))
    assert bool(mixtures) == case.startswith("attnres") == ("weights" in seen)
    for name in mixtures:  # the k-th mixture is reader k + 1: the first read mixes nothing
        weights, reference = seen["weights"][int(name.rpartition(".")[2]) + 1], tensors[name]
        finished = len(reference) - 1
        np.testing.assert_allclose(weights[:finished], reference[:-1], rtol=0, atol=1e-5)
        np.testing.assert_allclose(weights[-1], reference[-1], rtol=0, atol=1e-5)
        assert not np.any(weights[finished:-1])


@every_case
def test_skipped_and_swapped_layers(case):
    """DepthBench's layer pruning and permutation score."""
    tensors, _, model = load(case)
    ids = tensors["analysis.input_ids"].astype(np.int32)
    pruned = jax.jit(lambda layer: mean_loss(model, ids, skip=layer))
    losses = [pruned(layer) for layer in range(model.shape.layers)]
    np.testing.assert_allclose(losses, tensors["analysis.layer_pruning_loss"], rtol=0, atol=1e-5)

    swapped, baseline = jax.jit(lambda i, j: mean_loss(model, ids, swap=(i, j))), pruned(-1)
    np.testing.assert_allclose(baseline, tensors["analysis.baseline_loss"], rtol=0, atol=1e-5)
    for i, j in zip(*np.triu_indices(model.shape.layers, 1), strict=True):
        score = abs(swapped(i, j) - baseline) / baseline
        np.testing.assert_allclose(score, tensors["analysis.permutation"][i, j], rtol=0, atol=1e-5)


def test_missing_and_misshapen_tensors_are_listed():
    tensors, config, _ = load("attnres_full")
    broken = {k: v for k, v in tensors.items() if k != "blocks.3.mlp_res_proj.weight"}
    broken["lm_head.w_out.weight"] = broken["lm_head.w_out.weight"][:, :-1]
    with pytest.raises(InputError, match=r"blocks\.3\.mlp_res_proj\.weight is missing") as error:
        from_depthbench(broken, config)
    assert "lm_head.w_out.weight has shape (97, 47)" in str(error.value)
