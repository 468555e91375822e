"""What `ResidualModule` promises to the model that holds it: dtypes, sharding, clear errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from depthjax.residuals import (
    HC,
    MHC,
    BlockAttnRes,
    FullAttnRes,
    Keel,
    MoDA,
    PreLN,
    ResidualModule,
    apply_branches,
)

pytestmark = pytest.mark.jax_version

LAYERS, WIDTH = 3, 16
RULES = [PreLN(), Keel(), BlockAttnRes(), HC(), MHC()]
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


def build(rule, **options):
    return ResidualModule(rule, layers=LAYERS, width=WIDTH, rngs=nnx.Rngs(0), **options)


def run(module, x):
    """The stack with tanh for every branch; also the inputs that the branches got."""
    state, inputs = module.begin(x), []
    for s in range(2 * LAYERS):
        u, _, state = module.read(state, s)
        state = module.write(state, jnp.tanh(u), s)
        inputs.append(u)
    return module.finish(state), inputs


@every_rule
def test_bfloat16_activations_stay_bfloat16(rule):
    """dtype wins over the embedding's; the result is the fp32 one to the rounding of bf16."""
    x = jax.random.normal(jax.random.key(0), (2, 5, WIDTH))
    exact, _ = jax.jit(lambda x: run(build(rule), x))(x)
    rounded, inputs = jax.jit(lambda x: run(build(rule, dtype=jnp.bfloat16), x))(x)
    assert {u.dtype for u in [rounded, *inputs]} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_allclose(rounded.astype(jnp.float32), exact, rtol=0.04, atol=0.04)


@every_rule
def test_param_dtype_spares_what_a_variant_pins(rule):
    module = build(rule, param_dtype=jnp.bfloat16)
    declared = module.rule.parameters(LAYERS, WIDTH)
    for (kind, name), parameter in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        pinned = declared[kind][name].float32
        assert parameter.dtype == (jnp.float32 if pinned else jnp.bfloat16), (kind, name)
    assert module.mlp["norm"].dtype == jnp.bfloat16


@every_rule
def test_metadata_shards_the_parameters(rule):
    """On a mesh of eight devices: divided on the axis that eight divides, if it is the only one."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))

    def by_width(path, shape):
        axes = ["fsdp" if size % 8 == 0 else None for size in shape]
        return {"out_sharding": tuple(axes) if axes.count("fsdp") == 1 else (), "team": "depth"}

    with jax.set_mesh(mesh):
        module = build(rule, metadata=by_width)
        result, _ = jax.jit(lambda x: run(module, x))(jnp.ones((2, 5, WIDTH)))
    for path, parameter in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        expected = by_width("/".join(path), parameter.shape)
        metadata = parameter.get_metadata()
        assert metadata["team"] == "depth"
        assert metadata["out_sharding"] == expected["out_sharding"], path
        spec = P(*expected["out_sharding"])
        assert parameter[...].sharding.is_equivalent_to(
            jax.sharding.NamedSharding(mesh, spec), parameter.ndim
        )
    shard = module.mlp["norm"][...].addressable_shards[3]
    assert shard.data.shape == (LAYERS, WIDTH // 8)
    plain, _ = jax.jit(lambda x: run(build(rule), x))(jnp.ones((2, 5, WIDTH)))
    np.testing.assert_allclose(result, plain, rtol=0, atol=1e-5)


def test_metadata_may_be_the_same_for_all():
    module = build(BlockAttnRes(), metadata={"team": "depth"})
    for _, parameter in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        assert parameter.get_metadata()["team"] == "depth"
        assert parameter.get_metadata()["decay"] == "vector"


@every_rule
def test_explicit_mesh(rule):
    """On the mesh that jax.make_mesh gives by default, the batch divided over it."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x = jax.random.normal(jax.random.key(0), (8, 5, WIDTH))
    expected, _ = run(build(rule), x)
    with jax.set_mesh(mesh):
        module = build(rule)
        result, _ = run(module, jax.device_put(x, jax.sharding.NamedSharding(mesh, P("data"))))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


WRONG = {
    "rule is the class PreLN: give an instance": lambda: build(PreLN),
    "streams is 0: give a positive number": lambda: build(HC(streams=0)),
    "eps is -1: give a positive number": lambda: build(PreLN(eps=-1)),
    "layers is 0: give at least 1": lambda: PreLN().bind(0),
    "keel is bound to 3 layers, not 12": lambda: Keel().bind(3).bind(12),
    "topk is 2: give a fraction": lambda: build(FullAttnRes(topk=2)),
    "blocks is 0: give at least 1": lambda: BlockAttnRes.of_blocks(0, 6),
    "block_size_sublayers is 2.5": lambda: build(BlockAttnRes(block_size_sublayers=2.5)),
    "the embedding holds int32": lambda: build(HC()).begin(jnp.ones((2, WIDTH), jnp.int32)),
    r"the embedding is \(2, 3\), but width": lambda: build(PreLN()).begin(jnp.ones((2, 3))),
    r"sublayer 0 returned \(2, 1\)": lambda: first_write(PreLN(), jnp.ones((2, 1))),
    "moda needs what attention keeps: write with aux": lambda: first_write(
        MoDA(kv_heads=1, head_dim=4), jnp.ones((2, WIDTH))
    ),
    "params are not those of 4 branches": lambda: apply_branches(
        PreLN(), build(PreLN()).params(), 4 * [jnp.sin], jnp.ones((2, WIDTH))
    ),
}


def first_write(rule, y):
    module = build(rule)
    _, _, state = module.read(module.begin(jnp.ones((2, WIDTH))), 0)
    return module.write(state, y, 0)


@pytest.mark.parametrize(("message", "act"), WRONG.items(), ids=WRONG)
def test_wrong_use_is_one_sentence(message, act):
    with pytest.raises(ValueError, match=message):
        act()


@every_rule
def test_branches_may_return_another_dtype(rule):
    module = build(rule, dtype=jnp.bfloat16)
    state = module.begin(jnp.ones((2, WIDTH)))
    for s in range(2 * module.layers):
        u, _, state = module.read(state, s)
        state = module.write(state, u.astype(jnp.float32), s)
    assert module.finish(state).dtype == jnp.bfloat16
