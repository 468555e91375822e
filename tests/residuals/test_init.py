"""How each variant starts, and what of it is decayed, as DepthBench, appendix A, prescribes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from depthjax.models import Shape, Transformer, shape_of
from depthjax.residuals import (
    HC,
    MHC,
    REGISTRY,
    BlockAttnRes,
    DeepNorm,
    DepthMuP,
    FullAttnRes,
    MHCLite,
    MHCNative,
    MHCStatic,
    MoDA,
    PreLN,
    append,
    init_params,
)
from depthjax.residuals.mhc import log_sinkhorn, permutation_mixture, sinkhorn
from depthjax.residuals.module import sublayer_params

SHAPE = Shape(layers=3, width=64, heads=4, kv_heads=2, mlp_width=160)
STREAMS = [HC(), MHC(), MHCNative(), MHCLite(), MHCStatic()]
TRUNCATED = 0.9866 * 0.02  # standard deviation of a normal of 0.02 cut at three of them


def build(residual):
    return Transformer(SHAPE, 512, residual, rngs=nnx.Rngs(0))


def spread(parameter):
    return float(np.std(parameter[...]))


def test_deepnorm_shrinks_all_but_query_and_key():
    model, beta = build(DeepNorm()), (8 * SHAPE.layers) ** -0.25
    for matrix in (model.attention.value, model.attention.out):
        assert spread(matrix) == pytest.approx(beta * TRUNCATED, rel=0.03)
    for matrix in (model.mlp.gate, model.mlp.up, model.mlp.down):
        assert spread(matrix) == pytest.approx(beta * TRUNCATED, rel=0.03)
    for matrix in (model.attention.query, model.attention.key, model.embedding, model.head):
        assert spread(matrix) == pytest.approx(TRUNCATED, rel=0.03)


@pytest.mark.parametrize("residual", STREAMS, ids=lambda r: r.name)
def test_streams_halve_what_is_written(residual):
    """W_o and w2 are divided by sqrt(m) = 2, nothing else is."""
    model = build(residual)
    for matrix in (model.attention.out, model.mlp.down):
        assert spread(matrix) == pytest.approx(TRUNCATED / 2, rel=0.03)
    for matrix in (model.attention.value, model.mlp.up, model.head):
        assert spread(matrix) == pytest.approx(TRUNCATED, rel=0.03)


@pytest.mark.parametrize("residual", STREAMS, ids=lambda r: r.name)
def test_streams_start_near_one_plain_stream(residual):
    """Sublayer s reads stream s mod 4; each stream is carried on; writes have weight 1 (static mHC:
    a quarter, as they sum to one)."""
    model = build(residual)
    streams = jax.random.normal(jax.random.key(0), (4, 5, SHAPE.width))
    for s in range(2 * SHAPE.layers):
        read, write, transport = residual.weights(model.residual.sublayer_params(s), streams)
        # Softmax and sigmoid of a gap of 8; mHC-lite has 23 permutations beside the identity.
        atol = {"hc": 1e-6, "mhc_lite": 23 * np.exp(-8)}.get(residual.name, 1.1e-3)
        np.testing.assert_allclose(read.T, np.tile(np.eye(4)[s % 4], (5, 1)), atol=atol)
        expected = 0.25 if residual.name == "mhc_static" else 1.0
        np.testing.assert_allclose(write, np.full((4, 5), expected), atol=1e-6)
        np.testing.assert_allclose(transport.T, np.tile(np.eye(4), (5, 1, 1)), atol=atol)
        if residual.name == "mhc":  # DepthBench, appendix A
            np.testing.assert_allclose(transport[0, 0], 0.99899, atol=1e-5)
            np.testing.assert_allclose(transport[0, 1], 3.4e-4, atol=5e-6)


@pytest.mark.parametrize("name", REGISTRY)
def test_norms_start_at_one(name):
    scales = [
        value[...]
        for path, value in nnx.to_flat_state(nnx.state(build(REGISTRY[name]()).residual))
        if "norm" in path[-1]
    ]
    assert len(scales) >= 3
    assert all((scale == 1).all() for scale in scales)


@pytest.mark.parametrize("residual", [FullAttnRes, BlockAttnRes])
def test_depth_attention_starts_uniform(residual):
    """Attention Residuals: queries exactly zero, key scales one; the options alike."""
    model = build(residual(logit_scale=True, bias=True))
    for kind in ("attention", "mlp", "final"):
        mixer = getattr(model.residual, kind)
        for name in ("query", "logit_scale", "source_bias"):
            assert not mixer[name][...].any()
        assert (mixer["key_scale"][...] == 1).all()
        assert mixer["query"][...].dtype == jnp.float32


def test_topk_keeps_the_older_of_equal_sources():
    """Queries start at zero, so that all logits are equal: the oldest ceil(n / 2) sources stay
    (DepthBench's kernel prefers the lower index)."""
    rule = FullAttnRes(topk=0.5).bind(3)
    params = init_params(rule, jax.random.key(0), layers=3, width=8)
    carry, history = rule.begin(jnp.ones((1, 8)), 3)
    for s in range(6):
        row = sublayer_params(rule, params, s, layers=3, width=8)
        weights = rule.observe(row, carry, history, s)["weights"][:, 0]
        sources = jnp.append(weights[:s], weights[-1])  # the finished ones and the open sum
        kept = -(-(s + 1) // 2)
        np.testing.assert_allclose(sources, np.where(np.arange(s + 1) < kept, 1 / kept, 0))
        _, _, carry, history = rule.read(row, carry, history, s)
        carry, appended = rule.write(row, carry, jnp.ones((1, 8)) * s, None, s)
        history = append(history, appended)


FLOAT32 = {  # DepthBench: what stays fp32 where the rest is bf16
    "mhc": {"b", "alpha_pre", "alpha_post", "alpha_res"},
    "full_attnres": {"query", "key_scale"},
    "mhc_static": {"H_pre_logits", "H_post_logits", "H_res_logits"},
    "mhc_native": {
        f"{kind}_{part}"
        for kind in ("pre", "post", "residual")
        for part in ("bias", "dynamic_proj", "gate")
    },
    "pre_ln": set(),
    "hc": set(),
    "moda": set(),
}


@pytest.mark.parametrize("name", FLOAT32)
def test_what_stays_float32(name):
    rule = REGISTRY[name]().bind(SHAPE.layers, (2, 16))
    options = {"layers": SHAPE.layers, "width": 64, "param_dtype": jnp.bfloat16}
    params = init_params(rule, jax.random.key(0), **options)
    found = {n for n, value in params["mlp"].items() if value.dtype == jnp.float32}
    assert found == FLOAT32[name]


def test_zero_queries_make_the_plain_network():
    """The mixture is then the mean of the sources, which a norm cannot tell from their sum, but
    for its epsilon."""
    ids = jax.random.randint(jax.random.key(0), (2, 9), 0, 512)
    plain, eps = build(PreLN(eps=1e-12))(ids), {"eps": 1e-12, "mix_eps": 1e-12}
    for residual in (FullAttnRes(**eps), BlockAttnRes(**eps, block_size_sublayers=4)):
        np.testing.assert_allclose(build(residual)(ids), plain, atol=1e-5)


def test_width_transfer_starts_smaller():
    """DepthBench's code: blocks with sigma (D / base)^(-1/2), the head with sigma."""
    model = build(DepthMuP(base_width=16))
    for matrix in (model.attention.query, model.attention.out, model.mlp.gate, model.mlp.down):
        assert spread(matrix) == pytest.approx(TRUNCATED / 2, rel=0.03)
    for matrix in (model.embedding, model.head):
        assert spread(matrix) == pytest.approx(TRUNCATED, rel=0.03)


def test_moda_projection():
    projection = build(MoDA()).residual.mlp["kv_proj"]
    assert projection[...].shape == (SHAPE.layers - 1, SHAPE.width, 2, 2, 16)
    assert spread(projection) == pytest.approx(TRUNCATED, rel=0.03)


TOTALS = {  # DepthBench, table 6
    **dict.fromkeys(("pre_ln", "post_ln", "lns", "deepnorm"), 405_406_720),
    "sandwich_ln": 405_455_872,
    "keel": 405_454_848,
    **dict.fromkeys(("full_attnres", "block_attnres"), 405_505_024),
    "hc": 405_702_880,
    **dict.fromkeys(("mhc", "mhc_native"), 410_126_608),
    "mhc_static": 405_407_872,
    **dict.fromkeys(("moda", "post_ln_moda"), 453_641_216),
}


@pytest.mark.parametrize(("name", "total"), TOTALS.items(), ids=TOTALS)
def test_parameters_at_24_layers(name, total):
    residual = REGISTRY[name]()
    model = nnx.eval_shape(
        lambda: Transformer(shape_of("400m-L24"), 50280, residual, rngs=nnx.Rngs(0))
    )
    assert sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))) == total


@pytest.mark.parametrize("project", [sinkhorn, log_sinkhorn])
def test_sinkhorn_is_doubly_stochastic_with_the_right_gradient(project):
    """Columns, normalised last, sum to one; rows nearly; gradients equal finite differences."""
    with jax.enable_x64(True):
        logits = jax.random.normal(jax.random.key(0), (4, 4, 7), jnp.float64)
        matrix = project(logits, 20)
        np.testing.assert_allclose(matrix.sum(0), 1, atol=1e-5)
        np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-5)
        target = jax.random.normal(jax.random.key(1), matrix.shape, jnp.float64)

        def loss(logits):
            return jnp.sum(project(logits, 20) * target)

        gradient, step = jax.grad(loss)(logits), 1e-6
        for index in [(0, 0, 0), (1, 2, 3), (3, 3, 6)]:
            shift = jnp.zeros_like(logits).at[index].set(step)
            difference = (loss(logits + shift) - loss(logits - shift)) / (2 * step)
            np.testing.assert_allclose(gradient[index], difference, rtol=1e-5, atol=1e-8)


def test_permutation_mixture_is_doubly_stochastic():
    logits = 8 * jax.random.normal(jax.random.key(0), (24, 7))
    matrix = permutation_mixture(logits, 4)
    np.testing.assert_allclose(matrix.sum(0), 1, atol=1e-6)
    np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-6)
    assert float(matrix.min()) >= 0
