"""Both phases of reading a block's sources: every form, forward and backward.

The Mosaic forms run in JAX's simulation of a TPU, which looks for races, and are held to the XLA
form in float64, which is held to one softmax over all sources.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType

from depthjax.kernels import depth_mix, phase1, phase2
from depthjax.kernels.bf16_terms import bf16_terms
from depthjax.kernels.two_phase.api import phase1_backward

# Relative to a tensor's largest value.
BOUND = {"float32": 1e-5, "bfloat16": 2**-7}


@pytest.fixture
def races():
    """Kernels run under the race detector; returns whether it found one."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield lambda: interpret_pallas_call.races.races_found
    pltpu.reset_tpu_interpret_mode_state()


def normal(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def with_gradients(function, arguments, cotangents):
    """(*outputs, *gradients) of function(*arguments)."""

    def run(arguments, cotangents):
        outputs, pull = jax.vjp(function, *arguments)
        pairs = zip(cotangents, outputs, strict=True)
        return *outputs, *pull(tuple(c.astype(o.dtype) for c, o in pairs))

    return jax.jit(run)(arguments, cotangents)


def in_float64(function, arguments, cotangents):
    with jax.enable_x64(True):
        wide = [[jnp.asarray(x, jnp.float64) for x in given] for given in (arguments, cotangents)]
        return [np.asarray(x) for x in with_gradients(function, *wide)]


def assert_close(actual, reference, bounds):
    for k, (a, b) in enumerate(zip(actual, reference, strict=True)):
        a, bound = np.asarray(a, np.float64), bounds[k] if isinstance(bounds, list) else bounds
        finite = np.isfinite(b)
        np.testing.assert_array_equal(a[~finite], b[~finite])
        scale = np.max(np.abs(b[finite]), initial=0)
        error = np.max(np.abs(a[finite] - b[finite]), initial=0)
        assert error <= bound * scale, f"result {k}: off by {error / scale} of {scale}"


def sources(kind, rows, shape, width, dtype):
    v = normal(0, rows, *shape, width)
    if kind == "magnitudes":
        v *= jnp.logspace(-4, 4, rows).reshape(-1, *[1] * (v.ndim - 1))
    if kind == "tiny":  # eps is most of what a source is divided by
        v *= 1e-4
    return v.astype(dtype)


# rows, queries, tokens, width, dtype, count, kind
PHASE1 = {
    "fp32": (3, 4, (2, 12), 128, "float32", None, "normal"),
    "bf16": (8, 8, (40,), 128, "bfloat16", None, "normal"),
    "one source, one token, odd width": (1, 2, (1,), 72, "bfloat16", None, "normal"),
    "dead rows, ragged tokens": (9, 11, (37,), 72, "bfloat16", 4, "normal"),
    "dead rows, fp32": (5, 3, (9,), 136, "float32", 2, "normal"),
    "no live row": (2, 3, (5,), 128, "bfloat16", 0, "normal"),
    "many rows": (18, 2, (8,), 128, "float32", 7, "normal"),
    "magnitudes": (5, 3, (16,), 128, "float32", None, "magnitudes"),
    "tiny": (5, 3, (16,), 128, "float32", None, "tiny"),
    "saturated": (4, 3, (16,), 128, "float32", None, "saturated"),
    "saturated, bf16": (4, 3, (16,), 128, "bfloat16", None, "saturated"),
    "lanes in two groups": (1, 1, (2, 70), 1152, "bfloat16", None, "normal"),
}


@pytest.mark.parametrize("case", PHASE1)
def test_phase_1_on_a_tpu(case, races):
    rows, queries, tokens, width, dtype, count, kind = PHASE1[case]
    v = sources(kind, rows, tokens, width, dtype)
    u = normal(1, queries, width) * (10 if kind == "saturated" else 0.3)
    given = v if count is None else v.at[count:].set(jnp.nan)
    cotangents = normal(2, queries, *tokens, width, dtype=dtype), normal(3, queries, *tokens)

    def run(implementation, v, u):
        at = None if count is None else jnp.asarray(count)
        return phase1(v, u, count=at, implementation=implementation)

    actual = with_gradients(functools.partial(run, "mosaic"), (given, u), cotangents)
    reference = in_float64(functools.partial(run, "xla"), (v, u), cotangents)
    assert [x.dtype for x in actual] == [dtype, "float32", dtype, "float32"]
    exact = 1e-5 if kind != "saturated" else 1e-4  # logits of hundreds
    assert_close(
        actual, reference, [max(BOUND[dtype], exact), 1e-6, max(BOUND[dtype], exact), exact]
    )
    assert not races()


@pytest.mark.jax_version
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_phase_1_adds_to_a_cotangent(dtype, races):
    v, into = (normal(seed, 3, 20, 128, dtype=dtype) for seed in (0, 4))
    u, by, by_lse = 0.3 * normal(1, 2, 128), normal(2, 2, 20, 128, dtype=dtype), normal(3, 2, 20)
    lse = phase1(v, u, count=2, implementation="xla")[1]

    def run(implementation, into, *arguments):
        options = {"count": 2, "into": into, "implementation": implementation}
        return phase1_backward(*arguments, **options)

    arguments = into, v, u, lse, by, by_lse
    actual = jax.jit(functools.partial(run, "mosaic"))(*arguments)
    with jax.enable_x64(True):
        reference = run("xla", *(jnp.asarray(np.asarray(x, np.float64)) for x in arguments))
        reference = [np.asarray(x) for x in reference]
    assert_close(actual, reference, [BOUND[dtype], 1e-5])
    assert np.array_equal(actual[0][2], into[2])
    assert not races()


def test_weights_of_few_queries_are_as_exact_as_the_sources():
    """Rounded to bf16 once they would be off by 2^-9; mixtures in fp32 of weights in two terms."""
    x = normal(0, 64, 128)
    terms = bf16_terms(x)
    assert all(term.dtype == "bfloat16" for term in terms)
    assert np.array_equal(sum(term.astype("float32") for term in terms[::-1]), x)
    two = sum(term.astype("float32") for term in bf16_terms(x, 2))
    assert np.max(np.abs(two - x) / np.abs(x)) < 2**-15


# tokens, width, dtype, branch, fresh
PHASE2 = {
    "fp32": ((2, 12), 128, "float32", True, None),
    "bf16, two groups of lanes": ((520,), 128, "bfloat16", True, None),
    "one token, fresh": ((1,), 72, "bfloat16", True, True),
    "ragged, no branch": ((3, 7), 72, "float32", False, None),
    "not fresh": ((2, 16), 136, "bfloat16", True, False),
}


@pytest.mark.jax_version
@pytest.mark.parametrize("case", PHASE2)
def test_phase_2_on_a_tpu(case, races):
    tokens, width, dtype, has_branch, fresh = PHASE2[case]
    mixture, open_sum, branch = (normal(k, *tokens, width, dtype=dtype) for k in range(3))
    if dtype == "bfloat16" and not fresh:  # sums that need no rounding, as float64 does none
        open_sum = (open_sum + branch).astype(dtype)
        branch = jnp.zeros_like(branch)
    small = normal(3, *tokens), 0.1 * normal(4, width), normal(5, width)
    cotangents = [normal(k, *tokens, width, dtype=dtype) for k in (6, 7)]

    def run(implementation, mixture, open_sum, branch, lse, query, norm_scale):
        return phase2(
            mixture,
            lse,
            open_sum,
            branch if has_branch else None,
            query=query,
            norm_scale=norm_scale,
            fresh=None if fresh is None else jnp.asarray(fresh),
            eps=1e-5,
            implementation=implementation,
        )

    dead = open_sum * jnp.nan if fresh else open_sum
    arguments = mixture, dead, branch, *small
    actual = with_gradients(functools.partial(run, "mosaic"), arguments, cotangents)
    arguments = mixture, open_sum, branch, *small
    reference = in_float64(functools.partial(run, "xla"), arguments, cotangents)
    exact = 1e-5
    assert_close(actual, reference, [BOUND[dtype]] * 5 + [exact] * 3)
    assert not races()


def test_the_rounded_open_sum_is_read():
    """What is stored is what later sublayers read, and the gradient is taken there."""
    open_sum, branch = (normal(k, 4, 128, dtype="bfloat16") for k in range(2))
    options = {"query": normal(2, 128), "norm_scale": jnp.ones(128)}
    mixture, lse = normal(3, 4, 128, dtype="bfloat16"), normal(4, 4)
    for form in ("xla", "mosaic"):
        run = functools.partial(phase2, mixture, lse, implementation=form, **options)
        x, p = run(open_sum, branch)
        np.testing.assert_array_equal(p, open_sum + branch)
        np.testing.assert_array_equal(x, run(p)[0])


@pytest.mark.jax_version
@pytest.mark.parametrize("count", [None, 3, 0])
def test_two_phases_are_one(count):
    """Two-phase evaluation against one softmax, its gradients too, in float64."""
    with jax.enable_x64(True):
        shapes = (5, 2, 3, 16), (2, 3, 16), (4, 16), (4, 16), (16,), (4, 2, 3, 16)
        arrays = [normal(k, *shape, dtype="float64") for k, shape in enumerate(shapes)]

        def two(v, p, queries, key_scales, norm_scale):
            at = None if count is None else jnp.asarray(count)
            mixtures, lse = phase1(v, queries, key_scales, count=at)
            reads = [
                phase2(o, lse, p, query=q, key_scale=k, norm_scale=norm_scale)[0]
                for o, lse, q, k in zip(mixtures, lse, queries, key_scales, strict=True)
            ]
            return jnp.stack(reads)

        def one(v, p, queries, key_scales, norm_scale):
            options = {"count": count, "newest": p, "output_scale": norm_scale}
            pairs = zip(queries, key_scales, strict=True)
            return jnp.stack([depth_mix(v, q, k, **options) for q, k in pairs])

        *arguments, cotangent = arrays
        results = [
            with_gradients(lambda *a, f=f: (f(*a),), arguments, (cotangent,)) for f in (two, one)
        ]
        for a, b in zip(*results, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_an_infinite_log_sum_exp_leaves_the_mixture():
    """The first sublayer of a block reads no open sum."""
    mixture, p = normal(0, 3, 16), normal(1, 3, 16)
    options = {"query": normal(2, 16), "norm_scale": jnp.ones(16)}

    def read(lse, form):
        return phase2(mixture, jnp.full(3, lse), p, implementation=form, **options)[0]

    for form in ("xla", "mosaic"):
        of_mixture, of_sum = read(jnp.inf, form), read(-jnp.inf, form)
        for x, source in ((of_mixture, mixture), (of_sum, p)):
            rms = np.sqrt(np.mean(np.square(source), -1, keepdims=True))
            np.testing.assert_allclose(x, source / rms, rtol=1e-5)
        slope = jax.grad(lambda lse: jnp.sum(jnp.square(read(lse, form))))(jnp.inf)  # noqa: B023
        assert slope == 0


@pytest.mark.jax_version
@pytest.mark.parametrize("form", ["xla", "mosaic"])
def test_devices_share_a_batch(form):
    """And a sequence. Also parameters' gradients: each device sums its own tokens, then they are
    added."""
    v, queries = normal(0, 2, 8, 4, 128), normal(1, 2, 128)

    def loss(v, queries):
        mixtures, lse = phase1(v, queries, implementation=form)
        options = {"query": queries[0], "norm_scale": queries[1], "implementation": form}
        x, p = phase2(mixtures[0], lse[0], v[0], mixtures[1], **options)
        return jnp.sum(x * p) + jnp.sum(lse)

    compute = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    alone = compute(v, queries)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        shared = compute(v, queries)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), alone, shared)


def test_what_a_form_does_not_take():
    v = normal(0, 2, 4, 16).astype("float16")
    with pytest.raises(ValueError, match="mosaic_tpu"):
        phase1(v, normal(1, 2, 16), implementation="mosaic_tpu")
    with pytest.raises(ValueError, match="mosaic_gpu"):
        phase1(v, normal(1, 2, 16), implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="no branch"):
        phase2(v[0], v[0, :, 0], v[0], query=v[0, 0], norm_scale=v[0, 0], fresh=True)
