"""Where arrays lie: what is divided over which axis, and what a compiled step sends for it."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from depthjax.config import Config, MeshConfig, ModelConfig, TrainConfig
from depthjax.kernels.layout import gather_tokens, look_up, parameter_spec, state_specs
from depthjax.models import Shape, Transformer
from depthjax.parallel import make_mesh, parameter_shardings
from depthjax.plan.hlo import parse
from depthjax.plan.hlo_collectives import collectives
from depthjax.residuals import REGISTRY, BlockAttnRes, PreLN
from depthjax.train.step import Program

pytestmark = pytest.mark.jax_version

SIZES = {"data": 2, "fsdp": 2, "sequence": 1, "tensor": 2}
LAYERS, BATCH, LENGTH, WIDTH, HEADS, HEAD = 3, 8, 16, 32, 4, 8
TOKENS = (("data", "fsdp"), "tensor", None)  # of [B, T, D]


def mesh():
    kinds = (AxisType.Auto,) * len(SIZES)
    return jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=kinds)


def padded(spec, ndim):
    """A PartitionSpec as a tuple of `ndim`, an axis on its own by its name."""
    one = [part[0] if isinstance(part, tuple) and len(part) == 1 else part for part in spec]
    return (*one, *[None] * (ndim - len(one)))


@pytest.mark.parametrize("name", REGISTRY)
def test_depth_states_are_divided_as_tokens_are(name):
    """Whatever a variant keeps of a token lies where the token lies; no other axis is divided."""
    rule = REGISTRY[name]().bind(LAYERS, (HEADS, HEAD))
    embedding = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)

    def begin(x):
        return rule.begin(x, LAYERS)

    with jax.sharding.use_abstract_mesh(mesh().abstract_mesh):
        specs = state_specs(begin, embedding)

    def check(array, spec):
        spec = padded(spec, array.ndim)
        if array.shape[-3:] == (BATCH, LENGTH, WIDTH):
            assert spec == (*[None] * (array.ndim - 3), *TOKENS)
        elif array.shape[-4:] == (BATCH, LENGTH, HEADS, HEAD):  # keys and values
            assert spec == (*[None] * (array.ndim - 4), ("data", "fsdp"), None, "tensor", None)
        elif array.shape[-2:] == (BATCH, LENGTH):
            assert spec == (*[None] * (array.ndim - 2), *TOKENS[:2])
        else:
            assert array.ndim == 0  # counters

    jax.tree.map(check, jax.eval_shape(begin, embedding), specs)


@pytest.mark.parametrize("name", REGISTRY)
def test_parameters_are_divided_by_their_axes(name):
    shape = Shape(LAYERS, WIDTH, HEADS, HEADS, 48)
    build = lambda: Transformer(shape, 64, REGISTRY[name](), rngs=nnx.Rngs(0))  # noqa: E731
    params = nnx.state(nnx.eval_shape(build), nnx.Param)
    flat = jax.tree_util.tree_leaves_with_path(parameter_shardings(params, mesh()))
    found = {jax.tree_util.keystr(path, simple=True, separator="/"): s.spec for path, s in flat}
    wanted = {
        "embedding": P("tensor", "fsdp"),
        "head": P("fsdp", "tensor"),
        "attention/query": P(None, "fsdp", "tensor", None),
        "attention/key": P(None, "fsdp", "tensor", None),
        "attention/value": P(None, "fsdp", "tensor", None),
        "attention/out": P(None, "tensor", None, "fsdp"),
        "mlp/gate": P(None, "fsdp", "tensor"),
        "mlp/up": P(None, "fsdp", "tensor"),
        "mlp/down": P(None, "tensor", "fsdp"),
    }
    assert {path: found[path] for path in wanted} == wanted
    for path, spec in found.items():
        if path.startswith("residual/") and path.endswith(("query", "norm", "key_scale")):
            assert not any(spec)
        assert "tensor" not in spec or path in wanted


def test_what_does_not_divide_stays_whole():
    assert parameter_spec(("vocab", "width"), (63, 33), SIZES) == P(None, None)
    assert parameter_spec(("vocab", "width"), (64, 33), SIZES) == P("tensor", None)


@pytest.mark.parametrize("axis", ["data", "fsdp", "sequence"])
def test_a_branch_takes_what_a_read_gives(axis):
    """And no copy, which a backward pass would keep for every branch, though it reads again."""
    read = jnp.zeros((BATCH, LENGTH, WIDTH))
    with jax.sharding.use_abstract_mesh(AbstractMesh((2,), (axis,), (AxisType.Auto,))):
        assert gather_tokens(read) is read


@pytest.mark.parametrize("vocab", [64, 63])
def test_look_up(vocab):
    """As indexing, with its gradient; a vocabulary that does not divide is whole everywhere."""
    table = jax.random.normal(jax.random.key(0), (vocab, WIDTH))
    ids = jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 0, vocab)
    weight = jax.random.normal(jax.random.key(2), (BATCH, LENGTH, WIDTH))

    def of(look):
        return jax.jit(jax.value_and_grad(lambda table: jnp.sum(look(table, ids) * weight)))(table)

    expected = of(lambda table, ids: table[ids])
    with jax.set_mesh(mesh()):
        found = of(look_up)
    for a, b in zip(found, expected, strict=True):
        assert jnp.max(jnp.abs(a - b)) < 1e-4


def program(residual, **sizes):
    model = ModelConfig(
        shape="custom", layers=4, width=64, heads=4, mlp_width=96, context=64, residual=residual
    )
    config = Config(model=model, train=TrainConfig(batch=8), mesh=MeshConfig(**sizes)).check()
    return Program(config, 128, make_mesh(config))


def sent(residual, **sizes):
    """(collectives, program) of a compiled training step."""
    made = program(residual, **sizes)
    module = parse(made.lower().compile().as_text())
    return collectives(module, dict(made.mesh.shape)), module


def over(found, axis):
    return sum(c.sent for c in found if axis in c.axes.split("+"))


def test_reads_over_depth_send_nothing():
    """Block Attention Residuals against Pre-LN on the same mesh: the gradients of the queries are
    summed over all devices, and that is all that they send; their history lies in one piece of the
    tokens on each device, and is never gathered."""
    rule = BlockAttnRes(block_size_sublayers=3)
    plain, _ = sent(PreLN(), fsdp=2, tensor=2)
    block, module = sent(rule, fsdp=2, tensor=2)
    for axis in ("tensor", "fsdp"):
        assert over(plain, axis) <= over(block, axis) <= 1.02 * over(plain, axis)
    rows = jax.eval_shape(lambda x: rule.bind(4).begin(x, 4)[1], jnp.zeros((8, 64, 64))).shape[0]
    arrays = {a.shape for c in module.computations.values() for i in c for a in i.arrays}
    assert rows == 3  # as many as nothing else
    histories = {shape for shape in arrays if len(shape) == 4 and shape[0] == rows}
    assert histories == {(rows, 8 // 4, 64 // 2, 64)}
