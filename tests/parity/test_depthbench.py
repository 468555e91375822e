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
from weights import checksum, draw

from depthjax.errors import InputError
from depthjax.interop import from_depthbench, to_depthbench
from depthjax.train import loss

pytestmark = pytest.mark.jax_version

FOLDER = pathlib.Path(__file__).parent / "models"
FIXTURES = sorted(path.stem for path in FOLDER.glob("*.safetensors"))
# The variants of the authors' side branch, for which no analysis and no depth weights were run.
EXPERIMENTAL = {"attnres_bias", "attnres_logit_scale", "attnres_topk025"}
every_case = pytest.mark.parametrize("case", FIXTURES)
every_analysed_case = pytest.mark.parametrize(
    "case", [case for case in FIXTURES if case not in EXPERIMENTAL]
)


@functools.cache
def config_of(case):
    return json.loads((FOLDER / f"{case}.json").read_text())


@functools.cache
def load(case):
    """(tensors, config, model) of a fixture; its weights are drawn again."""
    config = config_of(case)
    tensors = load_file(FOLDER / f"{case}.safetensors")
    tensors |= draw(config["seed"], config["weights"])
    return tensors, config, from_depthbench(tensors, config)


def mean_loss(model, ids, **options):
    return loss.mean_loss(model, ids, **options)[0]


def test_all_fixtures_are_here():
    norms = {"preln", "preln_gqa", "postln", "sandwich", "lns", "lns_depth", "deepnorm", "keel"}
    scaled = {"depth_mup", "completep"}
    streams = {"hc", "mhc_liger", "mhc_native", "mhc_static"}
    blocks = {"attnres_block_b3", "attnres_block_b4", "attnres_block_b5_uneven"}
    moda = {"moda_pre", "moda_pre_gqa", "moda_post"}
    families = (norms, scaled, streams, {"attnres_full"}, blocks, EXPERIMENTAL, moda)
    assert set(FIXTURES) == set.union(*families)
    assert len(FIXTURES) == 24


@every_case
def test_weights_are_drawn_bit_for_bit(case):
    config = config_of(case)
    weights = draw(config["seed"], config["weights"])
    assert sum(value.size for value in weights.values()) == config["n_params"]
    assert checksum(weights) == config["weights_sha256"]


@every_case
def test_each_family_has_its_numbers(case):
    """No test below passes because a number to compare with is absent."""
    kinds = {name.partition(".")[0] for name in load_file(FOLDER / f"{case}.safetensors")}
    expected = {"input_ids", "logits", "loss", "hidden", "grad"}
    if case not in EXPERIMENTAL:
        expected |= {"analysis"}
    if config_of(case)["family"] == "hyper-connections":
        expected |= {"hc", "rederived"}
    if config_of(case)["family"] == "attnres" and case not in EXPERIMENTAL:
        expected |= {"attnres", "rederived"}
    assert kinds == expected


@every_case
def test_logits_and_loss(case):
    tensors, _, model = load(case)
    ids = tensors["input_ids"].astype(np.int32)
    logits = jax.jit(model)(ids)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, tensors["logits"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(mean_loss(model, ids), tensors["loss"], rtol=0, atol=1e-5)


@every_case
def test_gradients(case):
    tensors, _, model = load(case)
    ids = tensors["input_ids"].astype(np.int32)
    graph, params = nnx.split(model)
    gradients = jax.jit(jax.grad(lambda p: mean_loss(nnx.merge(graph, p), ids)))(params)
    ours = to_depthbench(nnx.merge(graph, gradients))  # under their names, in their layouts
    names = [name for name in tensors if name.startswith("grad.")]
    assert len(names) >= 7
    for name in names:
        gradient, reference = ours[name.removeprefix("grad.")], tensors[name]
        atol = max(1e-6, 3e-5 * np.abs(reference).max())
        np.testing.assert_allclose(gradient, reference, rtol=2e-3, atol=atol, err_msg=name)


@every_case
def test_depth_states_and_weights(case):
    tensors, _, model = load(case)
    ids = tensors["input_ids"].astype(np.int32)

    def observer(rule, params, carry, history, s):
        streams = carry.get("streams") if isinstance(carry, dict) else None
        if streams is not None:  # [m, B, T, D] -> [B m, T, D]
            hidden = jnp.swapaxes(streams, 0, 1).reshape(-1, *streams.shape[2:])
        else:
            hidden = rule.stream(carry)
        return {"hidden": hidden, **rule.observe(params, carry, history, s)}

    _, (seen, last) = jax.jit(lambda ids: model.features(ids, observer=observer))(ids)
    atol = 3e-4 if "hc" in case else 1e-4
    for layer in range(model.shape.layers + 1):
        hidden = seen["hidden"][2 * layer] if layer < model.shape.layers else last["hidden"]
        np.testing.assert_allclose(hidden, tensors[f"hidden.{layer}"], rtol=0, atol=atol)
    routing = sorted(name for name in tensors if name.startswith("hc."))
    assert bool(routing) == ("hc" in case) == ("transport" in seen)
    for name in routing:
        _, part, s = name.split(".")
        ours = seen[part][int(s)]
        ours = jnp.swapaxes(ours, -1, -2) if part == "transport" else ours
        np.testing.assert_allclose(ours, tensors[name], rtol=0, atol=1e-5, err_msg=name)
    mixtures = sorted(name for name in tensors if name.startswith("attnres.weights."))
    assert case.startswith("attnres") == ("weights" in seen)
    assert bool(mixtures) == (case.startswith("attnres") and case not in EXPERIMENTAL)
    for name in mixtures:  # the k-th mixture is reader k + 1: the first read mixes nothing
        reader, reference = int(name.rpartition(".")[2]) + 1, tensors[name]
        weights = [*seen["weights"], last["weights"]][reader]
        finished = len(reference) - 1
        np.testing.assert_allclose(weights[:finished], reference[:-1], rtol=0, atol=1e-5)
        np.testing.assert_allclose(weights[-1], reference[-1], rtol=0, atol=1e-5)
        assert not np.any(weights[finished:-1])


@every_analysed_case
def test_skipped_and_swapped_layers(case):
    """DepthBench's layer pruning and permutation score."""
    tensors, _, model = load(case)
    ids = tensors["analysis.input_ids"].astype(np.int32)
    pruned = jax.jit(lambda layer: mean_loss(model, ids, skip=layer))
    losses = [pruned(layer) for layer in range(model.shape.layers)]
    np.testing.assert_allclose(losses, tensors["analysis.layer_pruning_loss"], rtol=0, atol=1e-5)

    swapped, baseline = jax.jit(lambda i, j: mean_loss(model, ids, swap=(i, j))), pruned(-1)
    np.testing.assert_allclose(baseline, tensors["analysis.baseline_loss"], rtol=0, atol=1e-5)
    # For streams the authors' script moved the connectors only; the full swap is what is meant.
    full = tensors.get("rederived.permutation_full_swap", tensors["analysis.permutation"])
    for i, j in zip(*np.triu_indices(model.shape.layers, 1), strict=True):
        score = abs(swapped(i, j) - baseline) / baseline
        np.testing.assert_allclose(score, full[i, j], rtol=0, atol=1e-5)


@every_case
def test_round_trip_is_exact(case):
    tensors, config, model = load(case)
    written = to_depthbench(model)
    assert written.keys() == config["weights"].keys()
    for name, value in written.items():
        np.testing.assert_array_equal(value, tensors[name], err_msg=name)


def test_missing_and_misshapen_tensors_are_listed():
    tensors, config, _ = load("attnres_full")
    broken = {k: v for k, v in tensors.items() if k != "blocks.3.mlp_res_proj.weight"}
    broken["lm_head.w_out.weight"] = broken["lm_head.w_out.weight"][:, :-1]
    broken["blocks.3.extra.weight"] = np.zeros(3)
    with pytest.raises(InputError, match=r"blocks\.3\.mlp_res_proj\.weight is missing") as error:
        from_depthbench(broken, config)
    assert "lm_head.w_out.weight has shape (97, 47)" in str(error.value)
    assert "blocks.3.extra.weight with shape (3,) is not part of it" in str(error.value)
