"""The TPU kernels of streams, interpreted, against the XLA form in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType

from depthjax.kernels import read_streams
from depthjax.kernels.streams import mosaic_gpu
from depthjax.kernels.streams.blocks import Blocks
from depthjax.residuals import ATTENTION, HC, MHC, MHCLite, MHCNative, MHCStatic

FEW = {"sinkhorn_rounds": 3}  # what is spelled out takes a while to compile
RULES = [HC(), MHC(**FEW), MHCNative(**FEW), MHCLite(streams=3), MHCStatic(**FEW)]


def example(rule, tokens, width, dtype, batch=1):
    """(params, streams, cotangents), the connectors moved from where they start."""
    keys = map(functools.partial(jax.random.fold_in, jax.random.key(0)), range(100))

    def moved(parameter):
        start = parameter.init(next(keys), (1, *parameter.shape), jnp.float32)[0]
        size = 0.3 if parameter.float32 and start.ndim < 2 else 0.3 * width**-0.5
        return start + size * jax.random.normal(next(keys), start.shape)

    params = {name: moved(p) for name, p in rule.connection(ATTENTION, width).items()}
    params["norm"] = 1 + 0.1 * jax.random.normal(next(keys), (width,))
    shape = (rule.streams, batch, tokens, width)
    streams = jax.random.normal(next(keys), shape).astype(dtype)
    shapes = shape[1:], shape, shape[:-1]
    return params, streams, [jax.random.normal(next(keys), s).astype(dtype) for s in shapes]


def run(rule, implementation, params, streams, cotangents):
    """(outputs, gradients)."""

    def read(params, streams):
        gates, columns, scale = rule.gates(params), rule.columns(params), params["norm"]
        kernel = {"implementation": implementation}
        return read_streams(rule.weigh, rule.eps, gates, columns, scale, streams, **kernel)

    outputs, pull = jax.vjp(read, params, streams)
    cotangents = [c.astype(o.dtype) for c, o in zip(cotangents, outputs, strict=True)]
    return outputs, pull(tuple(cotangents))


def both(rule, *arrays):
    """By the kernels, and by XLA in float64 of the same numbers."""
    ours = jax.jit(functools.partial(run, rule, "mosaic_tpu"))(*arrays)
    wide = jax.tree.map(lambda x: np.asarray(x.astype(jnp.float32), np.float64), arrays)
    with jax.enable_x64(True):
        return ours, jax.jit(functools.partial(run, rule, "xla"))(*jax.tree.map(jnp.asarray, wide))


def errors(ours, reference):
    """Of each array, the largest, as a part of the largest entry."""

    def error(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b)
        return np.max(np.abs(a - b)) / np.max(np.abs(b))

    return np.array(jax.tree.leaves(jax.tree.map(error, ours, reference)))


def assert_close(ours, reference, bound):
    assert np.all(errors(ours, reference) <= bound)


@pytest.mark.jax_version
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_kernels_are_the_xla_form(rule):
    """The gradients of a doubly stochastic transport cancel: where XLA's are off by more, ours may
    be too."""
    given = example(rule, 32, 128, jnp.float32)
    ours, reference = both(rule, *given)
    xla = jax.jit(functools.partial(run, rule, "xla"))(*given)
    assert_close(ours, reference, np.maximum(1e-5, 2 * errors(xla, reference)))


@pytest.mark.parametrize("tokens", [1, 5, 40, 150], ids=lambda n: f"{n} tokens")
def test_any_number_of_tokens(tokens):
    """Also those that do not fill a block, whose rest is garbage."""
    rule = HC(streams=2)
    assert_close(*both(rule, *example(rule, tokens, 128, jnp.float32)), 1e-5)


@pytest.mark.parametrize("width", [72, 384, 1024])
def test_any_width(width):
    rule = HC(streams=2)
    assert_close(*both(rule, *example(rule, 32, width, jnp.float32)), 1e-5)


@pytest.mark.parametrize("magnitude", [1e-4, 1e4])
def test_any_magnitude(magnitude):
    rule = HC(streams=2)
    params, streams, cotangents = example(rule, 32, 128, jnp.float32)
    assert_close(*both(rule, params, streams * magnitude, cotangents), 2e-5)


@pytest.mark.parametrize("rule", [HC(streams=2), MHC(streams=2, **FEW)], ids=lambda rule: rule.name)
def test_bfloat16_streams_are_rounded_once(rule):
    """Weights and parameter gradients are as exact as of float32 streams."""
    ours, reference = both(rule, *example(rule, 64, 256, jnp.bfloat16))
    (x, mixed, write), (by_params, by_streams) = ours
    (x_, mixed_, write_), (by_params_, by_streams_) = reference
    assert_close((x, mixed, by_streams), (x_, mixed_, by_streams_), 2**-8)
    assert_close((write, by_params), (write_, by_params_), 1e-5)


def test_blocks_of_several_groups():
    """Two blocks of groups of tokens, in one sum; and two sums, as chips with two cores take."""
    rule = HC(streams=2)
    for tokens, blocks in ((384, 1), (2048, 2)):
        params, streams, cotangents = example(rule, tokens, 128, jnp.float32)
        assert Blocks.of(streams.reshape(2, -1, 128), None, 0).steps == blocks
        assert_close(*both(rule, params, streams, cotangents), 1e-5)


def test_weights_of_the_streams_alone():
    """Neither gates nor columns: more of a stream is read the larger it is."""

    def weigh(gates, products, squares):
        read = squares / jnp.sum(squares, axis=0)
        return read, 2 * read, jnp.stack([read, jnp.roll(read, 1, axis=0)])

    def loss(implementation, scale, streams):
        options = {"implementation": implementation}
        results = read_streams(weigh, 1e-6, {}, None, scale, streams, **options)
        return sum(jnp.sum(jnp.sin(x)) for x in results)

    given = jnp.arange(8.0), jax.random.normal(jax.random.key(0), (2, 5, 8))
    compute = jax.jit(jax.value_and_grad(loss, (1, 2)), static_argnums=0)
    assert_close(compute("mosaic_tpu", *given), compute("xla", *given), 1e-5)


def test_tokens_that_fill_up_a_gpu_kernel_leave_gates_alone():
    """Weights of zeros would be 0 / 0, and their share of the gate's gradient with them."""

    def weigh(gates, products, squares):
        read = gates * squares / jnp.sum(squares, axis=0)
        return read, read, jnp.stack([read, read])

    squares = jnp.arange(1.0, 11).reshape(2, 5)
    gradient = jax.grad(lambda g: jnp.sum(mosaic_gpu._weigh(weigh, g, None, squares)[0][0]))(2.0)
    np.testing.assert_allclose(gradient, jnp.sum(squares[0] / jnp.sum(squares, 0)), rtol=1e-6)


@pytest.mark.jax_version
def test_kernels_over_a_mesh():
    rule = HC(streams=2)
    given = example(rule, 16, 128, jnp.float32, batch=4)
    _, reference = both(rule, *given)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        assert_close(jax.jit(functools.partial(run, rule, "mosaic_tpu"))(*given), reference, 1e-5)


@pytest.mark.jax_version
def test_no_races():
    rule = HC(streams=2)
    given = example(rule, 32, 128, jnp.float32)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        results = both(rule, *given)
    assert_close(*results, 1e-5)
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    assert not interpreter.races.races_found


@pytest.mark.parametrize("form", ["mosaic_tpu", "mosaic_gpu"])
def test_no_form_for_float64(form):
    given = example(HC(streams=2), 16, 128, jnp.float32)
    with (
        jax.enable_x64(True),
        pytest.raises(ValueError, match=f"have no {form} form: give 'xla' or None"),
    ):
        run(HC(streams=2), form, *jax.tree.map(lambda x: x.astype(jnp.float64), given))


@pytest.mark.parametrize(
    ("rule", "width"), [(HC(), 72), (HC(streams=16), 7168), (HC(streams=1), 128)]
)
def test_streams_that_no_gpu_takes(rule, width):
    given = jax.eval_shape(lambda: example(rule, 2, width, jnp.float32))
    with pytest.raises(ValueError, match="have no mosaic_gpu form: give 'xla' or None"):
        jax.eval_shape(functools.partial(run, rule, "mosaic_gpu"), *given)
