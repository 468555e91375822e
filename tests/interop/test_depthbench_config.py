"""A DepthBench config or file that cannot be taken for what it says is refused, not guessed at."""

import functools
import json
import pathlib

import numpy as np
import pytest
from small_models import assert_same, random_model, small_config

from depthjax.errors import InputError
from depthjax.interop import DEPTHBENCH, export, from_depthbench, load
from depthjax.interop.depthbench import residual_of
from depthjax.residuals import LNS, MHC, FullAttnRes

PARITY = pathlib.Path(__file__).parent.parent / "parity" / "models"


@functools.cache
def checkpoint(residual=None):
    """(model, tensors, config) of a small model."""
    config = small_config(residual)
    model = random_model(config)
    return model, *export(DEPTHBENCH, config, model)


def refusal(case: str, change: dict) -> str:
    values = json.loads((PARITY / f"{case}.json").read_text()) | change
    with pytest.raises(InputError) as error:
        load(DEPTHBENCH, {}, values)
    message = str(error.value)
    assert message.startswith("in the depthbench config, ")
    assert len(message) < 500
    return message


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        ("preln", {"arch": "attnres_foo"}, "arch is 'attnres_foo': choose from preln, postln"),
        ("preln", {"arch": "attnres_bias7"}, "arch is 'attnres_bias7': choose from preln"),
        ("preln", {"arch": None}, "arch is None: choose from preln, postln"),
        ("preln", {"arch": ["hc"]}, "arch is ['hc']: choose from preln, postln"),
        ("preln", {"rope_theta": None}, "rope_theta is None: give a finite positive number"),
        ("preln", {"rope_theta": "x" * 10**6}, "xxx': give a finite positive number"),
        ("preln", {"rope_theta": True}, "rope_theta is True: give a finite positive number"),
        ("preln", {"norm_eps": -1e-6}, "norm_eps is -1e-06: give a finite positive number or 0"),
        ("preln", {"n_layers": 0}, "n_layers is 0: give a positive integer"),
        ("preln", {"n_heads": 4.0}, "n_heads is 4.0: give a positive integer"),
        ("preln", {"vocab_size": 1}, "model.vocab is 1: give 2 or more"),
        ("preln", {"experimental": {"bias": True}}, "experimental.bias is True: leave it out"),
        ("preln", {"experimental": [1]}, "experimental is [1]: give an object"),
        ("attnres_full", {"attnres_block_size": 3}, "attnres_block_size is 3: give 1 with arch"),
        ("attnres_full", {"attnres_block_size": [1]}, "attnres_block_size is [1]: give 1"),
        ("attnres_full", {"experimental": {"eps": 0.5}}, "can only be logit_scale, topk, bias"),
        ("attnres_full", {"experimental": {"foo": 1}}, "experimental.foo is 1: the keys of"),
        ("attnres_full", {"experimental": {"bias": 1}}, "experimental.bias is 1: give true"),
        ("attnres_full", {"experimental": {"topk": "x"}}, "experimental.topk is 'x': give a"),
        ("attnres_full", {"experimental": {"topk": 2}}, "topk is 2"),
        ("attnres_full", {"attnres_norm_eps": None}, "attnres_norm_eps is None: give a"),
        ("attnres_topk025", {"experimental": None}, "experimental.topk is None: arch attnres_topk"),
        ("attnres_bias", {"experimental": {}}, "experimental.bias is False: arch attnres_bias"),
        ("attnres_block_b3", {"attnres_block_size": None}, "attnres_block_size is None: give a"),
        ("attnres_block_b3", {"n_layers": 1}, "block_size_sublayers is 3, but 1 layers"),
        ("hc", {"hyper_connections": [1]}, "hyper_connections is [1]: give an object"),
        ("hc", {"n_streams": None}, "n_streams is None: give a positive integer"),
        (
            "mhc_static",
            {"hyper_connections": {"sinkhorn_iters": 3, "sinkhorn_tau": 0}},
            "hyper_connections.sinkhorn_tau is 0: give a finite positive number",
        ),
        ("completep", {"residual_scaling_base_depth": "3"}, "base_depth is '3': give a positive"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_value_of_a_key(case, change, words):
    assert words in refusal(case, change)


def test_missing_key_of_a_section():
    _, tensors, values = checkpoint(MHC())
    for section in (None, {}, {"sinkhorn_tau": 1.0}):
        with pytest.raises(InputError, match=r"no 'hyper_connections\.sinkhorn_iters', which"):
            load(DEPTHBENCH, tensors, {**values, "hyper_connections": section})


def test_names_of_experiments():
    values = {"norm_eps": 0, "attnres_norm_eps": 1e-5, "attnres_block_size": None}
    values |= {"arch": "attnres_topk050", "experimental": {"topk": 0.5}}
    assert residual_of(values) == FullAttnRes(eps=0.0, mix_eps=1e-5, topk=0.5)


@pytest.mark.parametrize("residual", [LNS(), LNS(constant=True), MHC(sinkhorn_delta=0.0)], ids=str)
def test_an_option_that_is_off_comes_back(residual):
    _, _, values = checkpoint(residual)
    assert residual_of(values) == residual


@pytest.mark.parametrize("name", ["foo.bar", "logits.extra", "model.blocks.0.norm", "gradient"])
def test_a_left_over_tensor_is_listed(name):
    _, tensors, values = checkpoint()
    with pytest.raises(InputError, match=f"{name} with shape \\(3,\\) is not part of it"):
        load(DEPTHBENCH, {**tensors, name: np.zeros(3)}, values)


def test_numbers_of_a_fixture_are_ignored():
    model, tensors, values = checkpoint()
    prefixes = ("grad", "hidden", "analysis", "rederived", "attnres", "hc")
    names = [*("input_ids", "logits", "loss", "depth_state.0", "readout.1")]
    names += [f"{prefix}.lm_head.norm.weight" for prefix in prefixes]
    names += ["blocks.0.attention_hyper_connection.branch.norm.weight"]
    beside = dict.fromkeys(names, np.zeros(3))
    assert_same(model, load(DEPTHBENCH, {**tensors, **beside}, values)[1])


@pytest.mark.parametrize("layers", [2000, 100_000, 10**7])
def test_more_layers_than_tensors(layers):
    _, tensors, values = checkpoint()
    for read in (functools.partial(load, DEPTHBENCH), from_depthbench):
        with pytest.raises(InputError, match=f"says {layers} layers, but .* has 30 tensors") as err:
            read(tensors, {**values, "n_layers": layers})
        assert len(str(err.value)) < 200


def test_ten_faults_are_listed_and_the_rest_counted():
    _, tensors, values = checkpoint()
    with pytest.raises(InputError, match=r"; and 8 more$") as error:
        load(DEPTHBENCH, tensors, {**values, "n_layers": 5})
    assert str(error.value).count(" is missing, of shape ") == 10
