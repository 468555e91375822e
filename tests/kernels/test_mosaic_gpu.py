"""The Mosaic GPU kernels: simulated with race detection, exported, and compiled for an H100."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from depthjax.aot.topology import mesh_of, prepare_environment, target
from depthjax.errors import InputError
from depthjax.kernels.mosaic_gpu import (
    fits,
    gather,
    mixture,
    parts,
    queries,
    queries_backward,
    two_phase,
)

pytestmark = pytest.mark.jax_version
simulated = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="jax 0.10 does not simulate a GPU"
)


def load_benchmark():
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check = load_benchmark()
every_kernel = pytest.mark.parametrize("case", check.CASES, ids=lambda case: case.name)


def simulation():
    return plgpu.InterpretGPUParams(detect_races=True)


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def exact_mixture(sources, u, eps):
    """(mixture, lse) in float64; sources: [n, T, D]."""
    v, u = np.asarray(sources, np.float64), np.asarray(u, np.float64)
    e = np.sum(v / np.sqrt(np.mean(v * v, -1, keepdims=True) + eps) * u, -1)
    lse = np.logaddexp.reduce(e, 0)
    return np.sum(np.exp(e - lse)[..., None] * v, 0), lse


def assert_close(actual, expected, relative=1e-5):
    expected = np.asarray(expected, np.float64)
    atol = relative * np.max(np.abs(expected))
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=0, atol=atol)


@simulated
@every_kernel
def test_kernels_equal_float64(case):
    assert check.worst_error(case, 2, 256, simulation()) < 4e-3  # bf16 rounds to 2^-9


@simulated
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_mixture_of_live_rows_and_the_newest(count, magnitude):
    """Some sources are ruled by eps, and dead rows hold anything; the softmax saturates."""
    rows, newest, u = (
        magnitude * normal(0, 4, 3, 128),
        magnitude * normal(1, 3, 128),
        normal(2, 128),
    )
    rows, u = rows.at[count:].set(jnp.nan), 3 * u
    z, lse = jax.jit(
        lambda count: mixture.mix(rows, count, newest, u, 1e-6, interpret=simulation())
    )(count)
    expected, expected_lse = exact_mixture([*rows[:count], newest], u, 1e-6)
    assert_close(z, expected)
    assert_close(lse, expected_lse)


@simulated
def test_one_token_and_one_source():
    rows, u = normal(0, 1, 1, 384), normal(1, 384)
    z, lse = mixture.mix(rows, 1, None, u, 1e-6, dtype=jnp.bfloat16, interpret=simulation())
    assert z.dtype == jnp.bfloat16
    assert_close(z, rows[0], 4e-3)
    assert_close(lse, exact_mixture(rows, u, 1e-6)[1])


@simulated
@pytest.mark.parametrize("newest", [False, True])
def test_mixture_gradients_in_float32(newest):
    """Cotangents of live rows are added to what is there, and those of dead rows left alone."""
    rows, own, u, c = (
        normal(i, *shape) for i, shape in enumerate([(3, 2, 128), (2, 128), (128,), (2, 128)])
    )
    u = 0.2 * u
    before = normal(4, 3, 2, 128)

    def naive(rows, own, u):
        v = jnp.concatenate([rows[:2], own[None]]) if newest else rows[:2]
        e = jnp.sum(check.rms(v, 1e-6) * u, axis=-1)
        return jnp.sum(jax.nn.softmax(e, axis=0)[..., None] * v, axis=0)

    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (rows, own, u, c)]
        by_rows, by_own, by_u = map(np.asarray, jax.vjp(naive, *wide[:3])[1](wide[3]))
    dead = rows.at[2].set(jnp.nan)
    actual = mixture.mix_backward(
        dead, 2, own if newest else None, u, 1e-6, None, c, before, interpret=simulation()
    )
    assert_close(actual[0], before + by_rows)
    np.testing.assert_array_equal(actual[0][2], before[2])
    assert_close(actual[2], by_u)
    assert actual[3] is None
    if newest:
        assert_close(actual[1], by_own)
    else:
        assert actual[1] is None


@simulated
def test_merge_does_not_see_the_sum_of_a_finished_block():
    inputs = check.merge_inputs(3, 128)
    garbage, branch, z, *rest = jnp.full((3, 128), jnp.nan, jnp.bfloat16), *inputs[1:]
    x, p = two_phase.merge(
        garbage, branch, jnp.bool_(True), z, *rest, (1e-6, 1e-5), interpret=simulation()
    )
    np.testing.assert_array_equal(p, branch)
    assert_close(x, check.naive_merge(branch, z, *rest)[0], 8e-3)
    results = two_phase.merge_backward(
        garbage, branch, True, z, rest[0], rest[1:], (1e-6, 1e-5), (x, None), interpret=simulation()
    )
    for result in results:
        assert np.all(np.isfinite(np.asarray(result, np.float32)))


@simulated
@pytest.mark.parametrize("registers", [8192, 512, 128])
def test_queries_in_parts_of_the_features(monkeypatch, registers):
    """One pass where all fits into registers, else parts of the features, or of the queries."""
    monkeypatch.setattr(parts, "IN_REGISTERS", registers)
    rows, u = normal(0, 3, 2, 256), normal(1, 2, 256)
    z, lse = queries.phase_one(rows.at[2].set(jnp.nan), 2, u, 1e-6, interpret=simulation())
    for query in range(2):
        expected, expected_lse = exact_mixture(rows[:2], u[query], 1e-6)
        assert_close(z[query], expected)
        assert_close(lse[query], expected_lse)


@simulated
@pytest.mark.parametrize(
    ("count", "queries", "registers"), [(2, 2, 8192), (2, 2, 512), (2, 3, 512), (1, 1, 8192)]
)
def test_cotangents_of_queries_in_parts(monkeypatch, count, queries, registers):
    """Those of dead rows are left alone, whatever the rows hold."""
    monkeypatch.setattr(parts, "IN_REGISTERS", registers)
    rows, u, c = normal(0, 3, 1, 256), 0.2 * normal(1, queries, 256), normal(2, queries, 1, 256)
    before, d_lse = normal(3, 3, 1, 256), normal(4, queries, 1)
    with jax.enable_x64(True):
        live, *rest = (np.asarray(x, np.float64) for x in (rows[:count], u, c, d_lse))
        (_, lse), pull = jax.vjp(check.naive_phase_one, live, rest[0])
        by_rows, du = map(np.asarray, pull(tuple(rest[1:])))
        lse = np.asarray(lse, np.float32)
    actual = queries_backward.phase_one_backward(
        rows.at[count:].set(jnp.nan), count, u, 1e-6, lse, (c, d_lse), before,
        interpret=simulation(),
    )  # fmt: skip
    assert_close(actual[0][:count], before[:count] + by_rows)
    np.testing.assert_array_equal(actual[0][count:], before[count:])
    assert_close(actual[1], du)


@simulated
def test_gather_at_the_last_source():
    rows, last, u, lse, delta = check.gather_inputs(2, 128)
    dv, du = gather.gather_rows(rows, 8, last, u, lse, delta, 1e-6, interpret=simulation())
    assert np.all(np.isfinite(dv))
    np.testing.assert_array_equal(du[:8], 0)


@every_kernel
@pytest.mark.parametrize("width", [896, 7168])
def test_kernels_export_for_cuda(case, width):
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in abstract_inputs(case, 100, width)]
    exported = export.export(
        jax.jit(lambda *x: case.kernel(None, *x)),
        platforms=["cuda"],
        disabled_checks=[export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")],
    )(*arrays)
    assert "mosaic_gpu_v2" in exported.mlir_module()


def abstract_inputs(case, tokens, width):
    return jax.eval_shape(lambda: case.inputs(tokens, width))


def test_what_fits():
    assert fits(896, jnp.bfloat16, jnp.float32)
    assert fits(7168)
    assert not fits(72)
    assert not fits(8192)
    assert not fits(1024, jnp.float64)


@pytest.mark.plan
@pytest.mark.filterwarnings("ignore")  # of what compilers load
@every_kernel
@pytest.mark.parametrize("width", [896, 1024, 2048, 4096, 7168])
def test_kernels_compile_for_an_h100(case, width):
    try:
        described = target("h100:1")
    except InputError as error:
        pytest.skip(str(error))
    prepare_environment(described)
    mesh = mesh_of(described, {"data": 1})
    sharding = NamedSharding(mesh, P())
    arrays = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for x in abstract_inputs(case, 512, width)
    ]
    with jax.set_mesh(mesh):
        donated = () if case.carry is None else (case.carry,)
        lowered = jax.jit(lambda *x: case.kernel(None, *x), donate_argnums=donated).lower(*arrays)
        lowered.compile()
