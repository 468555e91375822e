"""The Mosaic GPU kernels: simulated with race detection, exported, and compiled for an H100."""

import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    use_abstract_mesh,
)
from jax.sharding import PartitionSpec as P

from depthjax.aot.topology import devices_of, prepare_environment, target
from depthjax.errors import InputError
from depthjax.kernels import depth_mix, gather_rows, mix_rows, phase1, read_streams
from depthjax.kernels.choice import choose
from depthjax.kernels.mosaic_gpu import (
    fits,
    gather,
    mixture,
    parts,
    queries,
    queries_backward,
    rounds,
    streams,
    two_phase,
    warpgroup,
)
from depthjax.kernels.streams.spelling import repeating
from depthjax.residuals import ATTENTION, BlockAttnRes, MHCStatic, ResidualModule
from depthjax.residuals.mhc import log_sinkhorn, sinkhorn

pytestmark = pytest.mark.jax_version
H100 = "NVIDIA H100 80GB HBM3"


def simulated(test):
    """With JAX's simulation of a GPU, which looks for races."""
    missing = not hasattr(plgpu, "InterpretGPUParams")
    test = pytest.mark.skipif(missing, reason="jax 0.10 does not simulate a GPU")(test)
    return pytest.mark.usefixtures("simulation")(test)


def load_cases():
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "gpu_cases.py"
    spec = importlib.util.spec_from_file_location("gpu_cases", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpu_cases = load_cases()
every_kernel = pytest.mark.parametrize("case", gpu_cases.CASES, ids=lambda case: case.name)


@pytest.fixture
def simulation(monkeypatch):
    """Of few rows and queries, to be quick."""
    for name, size in (("ROWS", 4), ("LIVE", 3), ("QUERIES", 3), ("STREAMS", 2)):
        monkeypatch.setattr(gpu_cases, name, size)
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield
    interpret_pallas_call.reset_gpu_interpret_mode_state()


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
    assert gpu_cases.worst_error(case, case.inputs(2, 256)) < 4e-3  # bf16 rounds to 2^-9


@simulated
@pytest.mark.parametrize("case", gpu_cases.PUBLIC, ids=lambda case: case.name)
def test_public_functions_and_gradients_equal_float64(case):
    arrays = [x.astype(jnp.float32) for x in case.inputs(2, 128)]
    assert gpu_cases.worst_error(case, arrays) < 1e-5


@simulated
def test_the_pull_form():
    """In fp32, and rounded once; rows of others hold NaN."""
    rows, *rest = (x.astype(jnp.float32) for x in gpu_cases.gather_inputs(2, 128))
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (rows, *rest)]
        expected = gather_rows(wide[0], 1, *wide[1:], 1e-6)
        mixed = mix_rows(wide[0], 2, wide[2][0], 1e-6)
        expected, mixed = jax.tree.map(np.asarray, (expected, mixed))
    behind, before = rows.at[:1].set(jnp.nan), rows.at[2:].set(jnp.nan)

    def gather_of(dtype=None):
        return gather_rows(behind, 1, *rest, 1e-6, dtype=dtype, implementation="mosaic_gpu")

    (dv, du), (rounded, _) = gather_of(), gather_of(jnp.bfloat16)
    assert_close(dv, expected[0])
    assert_close(du, expected[1])
    np.testing.assert_array_equal(rounded, dv.astype(jnp.bfloat16))
    z, lse = mix_rows(before, 2, rest[1][0], 1e-6, implementation="mosaic_gpu")
    assert_close(z, mixed[0])
    assert_close(lse, mixed[1])


@simulated
@pytest.mark.parametrize(("count", "magnitude"), [(0, 1e4), (3, 1e-4)])
def test_mixture_of_live_rows_and_the_newest(count, magnitude):
    """Some sources are ruled by eps, and dead rows hold anything; the softmax saturates."""
    rows, newest, u = (
        magnitude * normal(0, 4, 3, 128),
        magnitude * normal(1, 3, 128),
        normal(2, 128),
    )
    rows, u = rows.at[count:].set(jnp.nan), 3 * u
    z, lse = jax.jit(lambda count: mixture.mix(rows, count, newest, u, 1e-6))(count)
    expected, expected_lse = exact_mixture([*rows[:count], newest], u, 1e-6)
    assert_close(z, expected)
    assert_close(lse, expected_lse)


@simulated
def test_one_token_and_one_source():
    rows, u = normal(0, 1, 1, 384), normal(1, 384)
    z, lse = mixture.mix(rows, 1, None, u, 1e-6, dtype=jnp.bfloat16)
    assert z.dtype == jnp.bfloat16
    assert_close(z, rows[0], 4e-3)
    assert_close(lse, exact_mixture(rows, u, 1e-6)[1])


@simulated
def test_mixture_gradients_in_float32():
    """Those of live rows and of the newest source are added to what is there, and those of dead
    rows left alone."""
    rows, own, u, c = (
        normal(i, *shape) for i, shape in enumerate([(3, 2, 128), (2, 128), (128,), (2, 128)])
    )
    u = 0.2 * u
    before, before_own = normal(4, 3, 2, 128), normal(5, 2, 128)

    def naive(rows, own, u):
        v = jnp.concatenate([rows[:2], own[None]])
        e = jnp.sum(gpu_cases.rms(v, 1e-6) * u, axis=-1)
        return jnp.sum(jax.nn.softmax(e, axis=0)[..., None] * v, axis=0)

    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (rows, own, u, c)]
        by_rows, by_own, by_u = map(np.asarray, jax.vjp(naive, *wide[:3])[1](wide[3]))
    dead = rows.at[2].set(jnp.nan)
    actual = mixture.mix_backward(dead, 2, own, u, 1e-6, None, c, before, before_own)
    assert_close(actual[0], before + by_rows)
    np.testing.assert_array_equal(actual[0][2], before[2])
    assert_close(actual[2], by_u)
    assert actual[3] is None
    assert_close(actual[1], before_own + by_own)


@simulated
def test_merge_does_not_see_the_sum_of_a_finished_block():
    """Nor other mixtures than its own; without a branch the open sum stays as it is."""
    _, branch, z, *rest = gpu_cases.merge_inputs(3, 128)
    garbage = jnp.full((3, 128), jnp.nan, jnp.bfloat16)
    expected = gpu_cases.naive_merge(branch, z, *rest)[0]
    for open_sum, added, fresh in ((garbage, branch, jnp.bool_(True)), (branch, None, None)):
        x, p = two_phase.merge(
            jnp.stack([garbage, z]), 1, open_sum, added, *rest, fresh, (1e-6, 1e-5)
        )
        np.testing.assert_array_equal(p, branch)
        assert_close(x, expected, 8e-3)


@simulated
@pytest.mark.parametrize(("queries", "registers"), [(1, 8192), (2, 8192), (3, 512)])
def test_no_live_rows(monkeypatch, queries, registers):
    monkeypatch.setattr(parts, "IN_REGISTERS", registers)
    rows, u = jnp.full((2, 1, 256), jnp.nan), normal(1, queries, 256)
    z, lse = phase1(rows, u, count=0, implementation="mosaic_gpu")
    np.testing.assert_array_equal(z, 0)
    np.testing.assert_array_equal(lse, -np.inf)


@simulated
def test_queries_in_parts_of_the_features(monkeypatch):
    """One pass where all fits into registers, else parts of the features, or of the queries."""
    monkeypatch.setattr(parts, "IN_REGISTERS", 128)
    rows, u = normal(0, 3, 2, 256), normal(1, 2, 256)
    z, lse = queries.phase_one(rows.at[2].set(jnp.nan), u, 2, 1e-6)
    for query in range(2):
        expected, expected_lse = exact_mixture(rows[:2], u[query], 1e-6)
        assert_close(z[query], expected)
        assert_close(lse[query], expected_lse)


@simulated
@pytest.mark.parametrize(("count", "queries", "registers"), [(2, 3, 512), (1, 1, 8192)])
def test_cotangents_of_queries_in_parts(monkeypatch, count, queries, registers):
    """Those of dead rows are left alone, whatever the rows hold."""
    monkeypatch.setattr(parts, "IN_REGISTERS", registers)
    rows, u, c = normal(0, 3, 1, 256), 0.2 * normal(1, queries, 256), normal(2, queries, 1, 256)
    before, d_lse = normal(3, 3, 1, 256), normal(4, queries, 1)
    with jax.enable_x64(True):
        live, *rest = (np.asarray(x, np.float64) for x in (rows[:count], u, c, d_lse))
        (_, lse), pull = jax.vjp(gpu_cases.naive_phase_one, live, rest[0])
        by_rows, du = map(np.asarray, pull(tuple(rest[1:])))
        lse = np.asarray(lse, np.float32)
    actual = queries_backward.phase_one_backward(
        rows.at[count:].set(jnp.nan), c, before, lse, d_lse, u, count, 1e-6
    )  # fmt: skip
    assert_close(actual[0][:count], before[:count] + by_rows)
    np.testing.assert_array_equal(actual[0][count:], before[count:])
    assert_close(actual[1], du)


@simulated
@pytest.mark.parametrize(("algorithm", "times"), [(sinkhorn, 3), (log_sinkhorn, 3), (sinkhorn, 1)])
def test_rounds_of_a_step(algorithm, times):
    """Of a state alone, and of one beside arrays and numbers that every step sees; one round of
    `sinkhorn` leaves none to repeat."""
    logits, c = normal(0, 3, 3, 128), normal(1, 3, 3, 128)

    def run(logits, c):
        matrix, pull = jax.vjp(lambda x: algorithm(x, times), logits)
        return matrix, *pull(c)

    with repeating(rounds.repeat):
        actual = jax.jit(run)(logits, c)
    with jax.enable_x64(True):
        expected = run(*(np.asarray(x, np.float64) for x in (logits, c)))
    jax.tree.map(assert_close, actual, jax.tree.map(np.asarray, expected))


def test_the_stack_is_that_of_block_attnres():
    """The stack of reads that is timed, against the residual connection's own moves."""
    embedding, queries, scale = map(gpu_cases.up, gpu_cases.stack_inputs(3, 128))
    rule = BlockAttnRes(
        block_size_sublayers=gpu_cases.QUERIES,
        mix_eps=gpu_cases.EPS,
        eps=gpu_cases.EPS_OUT,
        two_phase=False,
    )
    module = ResidualModule(rule, layers=16, width=128, rngs=nnx.Rngs(0))
    for kind, start in (("attention", 2), ("mlp", 1)):  # the first sublayer has no query
        parameters = getattr(module, kind)
        parameters["query"][...] = queries[start::2]
        parameters["norm"][...] = jnp.broadcast_to(scale, (16, 128))
    state = module.begin(embedding)
    for s in range(32):
        x, _, state = module.read(state, s)
        state = module.write(state, x, s)
    assert_close(gpu_cases.read_stack("xla", embedding, queries, scale), x)


def test_what_rounds_take():
    """A step with moves of its own is left to XLA."""
    state, beside = jnp.ones((3, 3, 128)), jnp.ones((3, 1))
    assert rounds.takes(lambda x: x / jnp.sum(x, axis=0, keepdims=True), state)
    assert rounds.takes(lambda x: jnp.exp(x - 2 * state), state)
    assert not rounds.takes(lambda x: jnp.maximum(x, 0.5), state)
    assert not rounds.takes(lambda x: jnp.cumsum(x, axis=0), state)
    assert not rounds.takes(lambda x: x * beside, state)


@simulated
def test_streams_in_parts_of_the_features(monkeypatch):
    """Two parts, whose blocks take all tokens; with columns of each stream."""
    monkeypatch.setattr(parts, "IN_REGISTERS", 512)
    monkeypatch.setattr(warpgroup, "PROCESSORS", 1)
    monkeypatch.setattr(warpgroup, "SHARED_BYTES", 0)
    h, c, g = normal(0, 2, 3, 256), normal(1, 3, 256), normal(2, 2, 3, 256)
    r, k, own = normal(3, 3), normal(4, 3), normal(5, 2, 3)
    read, transport, scale = normal(6, 2, 3), normal(7, 2, 2, 3), normal(8, 256)
    weights = r, k, read, own, transport
    columns, factors = normal(9, 5, 2, 256), normal(10, 5, 3)
    for actual, expected in zip(
        streams.dots(h, c, g, read, scale),
        gpu_cases.naive_streams_dots(h, c, g, read, scale),
        strict=True,
    ):
        assert_close(actual, expected)
    by, by_scale = streams.spread(h, c, g, weights, scale, columns, factors)
    nothing = jnp.zeros((1, 256)), jnp.zeros((1, 2, 3))
    expected = gpu_cases.naive_streams_spread(h, c, g, *weights, scale, *nothing)
    assert_close(by, expected[0] + jnp.einsum("ct,cmd->mtd", factors, columns))
    assert_close(by_scale, expected[1])


@simulated
@pytest.mark.parametrize("magnitude", [1e-4, 1e4])
def test_streams_of_any_magnitude(magnitude):
    """Without columns; the norm is ruled by eps where they are small."""
    rule = MHCStatic(streams=2, sinkhorn_rounds=3)
    h, g = magnitude * normal(0, 2, 2, 128), normal(1, 2, 128)
    shapes = {name: p.shape for name, p in rule.connection(ATTENTION, 128).items()}
    gates = {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}

    def run(form, h, g, gates):
        def read(h, gates):
            x, mixed, _ = read_streams(
                rule.weigh, 1e-6, gates, None, jnp.ones(128), h, implementation=form
            )
            return x, mixed / magnitude

        out, pull = jax.vjp(read, h, gates)
        by_h, by_gates = pull((g, jnp.stack([g, -g])))
        return out, by_h, by_gates

    actual = run("mosaic_gpu", h, g, gates)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), (h, g, gates))
        expected = jax.tree.map(np.asarray, run("xla", *wide))
    jax.tree.map(lambda a, b: assert_close(a, b, 2e-5), actual, expected)


@simulated
def test_gather_at_the_last_source():
    rows, last, u, lse, delta = gpu_cases.gather_inputs(2, 128)
    dv, du = gather.gather(rows, 3, last, u, lse, delta, 1e-6)
    assert np.all(np.isfinite(dv))
    np.testing.assert_array_equal(du[:3], 0)


def on_chip(kind):
    """As if programs ran on a chip of this name."""
    device = AbstractDevice(kind, None, "gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def exported(function, arrays):
    """The module of a program for an H100."""
    with on_chip(H100):
        return export.export(
            jax.jit(function),
            platforms=["cuda"],
            disabled_checks=[export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")],
        )(*arrays).mlir_module()


@every_kernel
def test_kernels_export_for_cuda(case):
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in abstract_inputs(case, 100, 896)]
    assert "mosaic_gpu_v2" in exported(case.kernel, arrays)


@pytest.mark.parametrize("algorithm", [sinkhorn, log_sinkhorn])
def test_rounds_export_for_cuda(algorithm):
    logits = jax.ShapeDtypeStruct((4, 4, 256), jnp.float32)
    with repeating(rounds.repeat):
        module = exported(jax.grad(lambda x: jnp.sum(algorithm(x, 20) ** 2)), [logits])
    assert module.count("mosaic_gpu_v2") == 2


def abstract_inputs(case, tokens, width):
    return jax.eval_shape(lambda: case.inputs(tokens, width))


@pytest.mark.parametrize("kind", ["NVIDIA H20", "NVIDIA GH200 480GB", "NVIDIA B200", H100])
def test_new_gpus_run_the_kernels(kind):
    with on_chip(kind):
        assert choose(None) == "mosaic_gpu"
        assert choose(None, gpu=False) == "xla"


@pytest.mark.parametrize(
    "kind", ["NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-16GB", "NVIDIA L4", "NVIDIA GB10"]
)
def test_other_gpus_do_not(kind):
    with on_chip(kind):
        assert choose(None) == "xla"


@pytest.mark.skipif(hasattr(plgpu, "InterpretGPUParams"), reason="jax 0.12 simulates a GPU")
def test_no_simulation():
    with pytest.raises(NotImplementedError, match=r"^there is no GPU here, and jax 0\.10"):
        mix_rows(jnp.zeros((2, 1, 128)), 1, jnp.zeros(128), 1e-6, implementation="mosaic_gpu")


def test_sources_that_do_not_fit():
    with pytest.raises(
        ValueError, match=r"^sources are float32 of shape .* 72\): .* multiple of 128"
    ):
        depth_mix(jnp.zeros((2, 72)), jnp.zeros(72), implementation="mosaic_gpu")


def test_what_fits():
    assert fits(896, jnp.bfloat16, jnp.float32)
    assert fits(7168)
    assert fits(5760, jnp.float32)
    assert not fits(7168, jnp.float32)
    assert not fits(72)
    assert not fits(8192)
    assert not fits(1024, jnp.float64)


def compile_for(topology, function, arrays, donated=()):
    """The text of a program for the chips of a topology."""
    try:
        described = target(topology)
    except InputError as error:
        pytest.skip(str(error))
    prepare_environment(described)
    mesh = Mesh(np.array(devices_of(described)), ("data",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, P())
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for x in arrays]
    with jax.set_mesh(mesh):
        return jax.jit(function, donate_argnums=donated).lower(*arrays).compile().as_text()


@pytest.mark.plan
@pytest.mark.filterwarnings("ignore")  # of what compilers load
@every_kernel
@pytest.mark.parametrize("width", [896, 1024, 2048, 4096, 7168])
def test_kernels_compile_for_an_h100(case, width):
    donated = () if case.carry is None else (case.carry,)
    text = compile_for("h100:1", case.kernel, abstract_inputs(case, 512, width), donated)
    assert "mosaic_gpu_v2" in text


@pytest.mark.plan
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("queries", [1, 4, 11, 18, 64])
def test_public_functions_compile_for_two_h100s(monkeypatch, queries):
    """Forward and backward, without being told to; with the queries of various blocks."""
    monkeypatch.setattr(gpu_cases, "QUERIES", queries)
    cases = gpu_cases.PUBLIC if queries == 1 else gpu_cases.PUBLIC[2:3]
    for case in cases:
        text = compile_for(
            "h100:2", functools.partial(case.kernel.func, None), abstract_inputs(case, 512, 1792)
        )
        assert text.count('custom_call_target="mosaic_gpu_v2"') >= 2
