"""The shapes of the study against its published tables."""

import math

import jax
import pytest
from flax import nnx

from depthjax.errors import InputError
from depthjax.models import SHAPES, Shape, Transformer, shape_of
from depthjax.residuals import BlockAttnRes, PreLN

VOCAB = 50280

# DepthBench, appendix B: name -> layers, width, MLP width, head size, parameters in millions.
PUBLISHED = {
    "200m-L24": (24, 672, 1792, 42, 197.67),
    "200m-L18": (18, 768, 2048, 48, 204.66),
    "200m-L12": (12, 896, 2400, 56, 206.07),
    "300m-L28": (28, 800, 2144, 50, 296.25),
    "300m-L21": (21, 896, 2400, 56, 293.05),
    "300m-L14": (14, 1056, 2816, 66, 293.56),
    "400m-L16": (16, 1216, 3248, 76, 406.53),
    "400m-L20": (20, 1120, 2992, 70, 414.09),
    "400m-L24": (24, 1024, 2736, 64, 405.41),
    "400m-L28": (28, 960, 2560, 60, 406.25),
    "400m-L32": (32, 896, 2400, 56, 399.36),
    "400m-L42": (42, 800, 2144, 50, 404.15),
    "400m-L70": (70, 640, 1712, 40, 409.23),
    "500m-L34": (34, 992, 2656, 62, 502.40),
    "500m-L26": (26, 1120, 2992, 70, 504.53),
    "500m-L17": (17, 1344, 3584, 84, 503.69),
    "1.6b-L28": (28, 2048, 6144, 128, 1615),
    "1.6b-L40": (40, 1728, 5184, 108, 1607),
    "1.6b-L54": (54, 1504, 4512, 94, 1617),
}
EXTRA = {  # sizes only
    "400m-L26": (26, 992, 2656, 62),
    "400m-L30": (30, 928, 2480, 58),
    "400m-L36": (36, 864, 2304, 54),
    "400m-L50": (50, 736, 1968, 46),
    "400m-L56": (56, 704, 1888, 44),
    "400m-L62": (62, 672, 1792, 42),
}
# Constant backbone: layers, width, MLP width, head size, backbone and total in millions.
BACKBONE = {
    "backbone-300m-L16": (16, 1248, 3328, 78, 299.1, 424.6),
    "backbone-300m-L42": (42, 768, 2048, 48, 297.3, 374.6),
    "backbone-300m-L70": (70, 608, 1632, 38, 312.0, 373.1),
    "backbone-300m-L84": (84, 544, 1456, 34, 299.1, 353.8),
}


def count(shape, residual):
    def build():
        return Transformer(shape, VOCAB, residual, rngs=nnx.Rngs(0))

    state = nnx.state(nnx.eval_shape(build), nnx.Param)
    return sum(math.prod(x.shape) for x in jax.tree.leaves(state))


def sizes(shape):
    return shape.layers, shape.width, shape.mlp_width, shape.head_dim


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_to_the_printed_digit(name):
    *expected, millions = PUBLISHED[name]
    shape = shape_of(name)
    assert sizes(shape) == tuple(expected)
    digits = 0 if millions > 1000 else 2
    assert round(count(shape, PreLN()) / 1e6, digits) == millions


@pytest.mark.parametrize("name", EXTRA)
def test_extra_shapes(name):
    assert sizes(shape_of(name)) == EXTRA[name]


@pytest.mark.parametrize("name", BACKBONE)
def test_constant_backbone_shapes(name):
    *expected, backbone, total = BACKBONE[name]
    shape = shape_of(name)
    assert sizes(shape) == tuple(expected)
    everything = count(shape, PreLN())
    assert round(everything / 1e6, 1) == total
    blocks = everything - 2 * VOCAB * shape.width - shape.width  # less embedding, head, final norm
    assert round(blocks / 1e6, 1) == backbone


def test_every_shape_is_compared_with_something_published():
    repeated = {"backbone-300m-L24": "400m-L24", "backbone-300m-L32": "400m-L32"}
    assert all(shape_of(a) == shape_of(b) for a, b in repeated.items())
    assert set(SHAPES) == {*PUBLISHED, *EXTRA, *BACKBONE, *repeated, "tiny-L8"}


@pytest.mark.parametrize(
    ("layers", "size"), [(16, 4), (20, 5), (24, 6), (28, 7), (32, 8), (42, 11), (70, 18)]
)
def test_default_block_size(layers, size):
    """About eight blocks: b = ceil(2 L / 8)."""
    assert BlockAttnRes().bind(layers).block_size_sublayers == size


def test_block_sizes_in_other_units():
    assert BlockAttnRes.of_layers(12).block_size_sublayers == 24  # Kimi K3: 12 transformer layers
    assert BlockAttnRes.of_blocks(9, layers=27).block_size_sublayers == 6  # the paper's main run


@pytest.mark.parametrize("size", [0, -1, 49])
def test_block_size_out_of_range(size):
    with pytest.raises(ValueError, match=rf"block_size_sublayers is {size}, .* choose 1 to 48"):
        BlockAttnRes(block_size_sublayers=size).bind(24)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "model.heads is 5, which does not divide model.width 64"),
        ({"kv_heads": 3}, "model.kv_heads is 3, which does not divide model.heads 4"),
        ({"width": 60}, "odd size 15"),
        ({"layers": 0}, "model.layers is 0: give a positive integer"),
    ],
)
def test_sizes_that_do_not_fit(change, message):
    sizes = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 4, "mlp_width": 96}
    with pytest.raises(InputError, match=message):
        Shape(**{**sizes, **change})
