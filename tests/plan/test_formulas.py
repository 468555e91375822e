"""The formulas against the published tables."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from depthjax.config import Config, ModelConfig, build_model
from depthjax.infer.steps import in_activation_dtype
from depthjax.models import SHAPES
from depthjax.plan.chips import CHIPS, chip_of_kind, peak_flops
from depthjax.plan.flops import prefill_flops
from depthjax.plan.info import parameter_counts
from depthjax.plan.memory import decoding_parameter_bytes, key_value_bytes, training_bytes
from depthjax.residuals import REGISTRY, BlockAttnRes

VOCAB, TOKENS = 50280, 4096


def bound(name: str, shape: str, **options):
    s = SHAPES[shape]
    return s, REGISTRY[name](**options).bind(s.layers, (s.kv_heads, s.head_dim))


@pytest.mark.parametrize(
    ("name", "shape", "last", "every"),
    [
        ("pre_ln", "400m-L16", 2.98, 3.48),
        ("pre_ln", "400m-L70", 4.33, 4.59),
        ("full_attnres", "400m-L16", 2.99, None),
        ("full_attnres", "400m-L70", 4.43, None),
    ],
)
def test_prefill_flops_are_the_published(name, shape, last, every):
    """TFLOP of 4096 tokens (DepthBench, appendix D), with the last position's logits or all."""
    s, residual = bound(name, shape)
    assert prefill_flops(s, VOCAB, TOKENS, residual) / 1e12 == pytest.approx(last, abs=0.005)
    if every:
        counted = prefill_flops(s, VOCAB, TOKENS, residual, every_logit=True) / 1e12
        assert counted == pytest.approx(every, abs=0.005)


@pytest.mark.parametrize(("shape", "mebibytes"), [("400m-L16", 304), ("400m-L70", 700)])
def test_keys_and_values_are_the_published(shape, mebibytes):
    for name in REGISTRY:
        s, residual = bound(name, shape)
        assert key_value_bytes(s, TOKENS, 2, residual) == mebibytes * 2**20


@pytest.mark.parametrize("shape", ["400m-L16", "400m-L24", "400m-L70"])
def test_extras_are_the_published(shape):
    """Appendix D, a token: HC 192 d L, mHC 480 d L, Full 4 d L (2 L + 3)."""
    published = {
        "hc": lambda d, layers: 192 * d * layers,
        "mhc": lambda d, layers: 480 * d * layers,
        "full_attnres": lambda d, layers: 4 * d * layers * (2 * layers + 3),
        "pre_ln": lambda d, layers: 0,
    }
    for name, formula in published.items():
        s, residual = bound(name, shape)
        assert residual.flops_per_token(s.layers, s.width) == formula(s.width, s.layers)


@pytest.mark.parametrize("shape", ["400m-L16", "400m-L24", "400m-L32"])
def test_both_countings_of_blocks(shape):
    """What is read: 1 + ceil(s / b) sources by reader s, the final one included. What the study
    counts: 2 + floor(k / b) by reader k, and 9 by the final one."""
    s, residual = bound("block_attnres", shape)
    size, sublayers = residual.block, 2 * s.layers
    read = sum(1 + -(-k // size) for k in range(1, sublayers + 1))
    counted = sum(2 + k // size for k in range(1, sublayers)) + 9
    countings = residual.flop_countings(s.layers, s.width)
    assert countings == {"as computed": 4 * s.width * read, "as published": 4 * s.width * counted}
    assert counted - read == 7  # a source more at each of the 7 inner boundaries


def test_traffic_is_the_papers_table():
    """Attention Residuals, table 1: 128 sublayers, 8 blocks of 16, 4 streams; in units of D."""
    layers = 64
    _, plain = bound("pre_ln", "400m-L16")
    assert plain.elements_moved(16, 100) == {"stream": 300}
    streams = REGISTRY["mhc"]().elements_moved(layers, 1000)
    assert streams == {"unfused": 34 * 1000 + 2 * 16 + 16}
    full = REGISTRY["full_attnres"]().bind(layers).elements_moved(layers, 1)
    assert list(full.values()) == [24, 130, 65.5]
    block = BlockAttnRes(block_size_sublayers=16).bind(layers).elements_moved(layers, 1)
    assert list(block.values()) == pytest.approx([5.5, 11.9, 6.4], abs=0.04)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_state_by_hand(name):
    """bf16 elements: the stream; m streams and the fp32 write weights; finished sources and the
    open sum; 2 L - 2 keys and values, and the one in hand."""
    s, residual = bound(name, "400m-L16")
    plain, layers = 2 * s.width, s.layers
    streams = {"hc", "mhc", "mhc_native", "mhc_lite", "mhc_static"}
    by_hand = dict.fromkeys(streams, 4 * plain + 4 * 4)
    by_hand |= {"full_attnres": (2 * layers + 1) * plain, "block_attnres": 9 * plain}
    by_hand |= dict.fromkeys(("moda", "post_ln_moda"), plain + (2 * layers - 1) * 2 * plain)
    state = residual.state_bytes_per_token(layers, s.width, jnp.bfloat16)
    assert state == by_hand.get(name, plain)
    assert residual.carry_bytes_per_token(layers, s.width, jnp.bfloat16) <= state
    assert residual.matmul_flops_per_token(layers, s.width) >= 0
    # A scan computes every layer alike, also what the formula leaves out of the first or the last.
    at_most = residual.flops_per_token(layers, s.width) * layers / (layers - 1)
    assert residual.matmul_flops_per_token(layers, s.width) <= at_most


@pytest.mark.parametrize("name", ["block_attnres", "hc"])
@pytest.mark.parametrize("param_dtype", ["bfloat16", "float32"])
def test_parameter_bytes_are_those_of_the_arrays(name, param_dtype):
    """Trained, and as decoding holds them; queries and key scales stay in fp32."""
    dtypes = {"dtype": "bfloat16", "param_dtype": param_dtype}
    model = ModelConfig(shape="tiny-L8", residual=REGISTRY[name](), vocab=300, **dtypes)
    config = Config(model=model).check()

    def held(change):
        made = nnx.eval_shape(lambda: change(build_model(config, 300)))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(nnx.state(made, nnx.Param)))

    counts = parameter_counts(config, 300)
    trained = training_bytes(config, 300, sum(counts.values())).parameters
    assert trained == held(lambda model: model)
    assert decoding_parameter_bytes(config, counts) == held(in_activation_dtype)


def test_chips_by_the_names_that_jax_gives():
    kinds = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU v4": "v4"}
    kinds |= {"TPU7x": "tpu7x", "NVIDIA H100 80GB HBM3": "h100"}
    for kind, name in kinds.items():
        assert chip_of_kind(kind) is CHIPS[name]
    assert chip_of_kind("cpu") is None
    assert peak_flops("TPU v5p") == 459e12
