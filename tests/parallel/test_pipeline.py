"""The depth over stages equals the depth in one place, and moves as many bytes as it should."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from depthjax.models import Remat
from depthjax.models.depth import run_depth
from depthjax.models.sublayers import Sublayers
from depthjax.parallel.schedule import Schedule, formula
from depthjax.parallel.stages import run_stages
from depthjax.plan.hlo import parse
from depthjax.plan.hlo_collectives import permuted_bytes
from depthjax.residuals import (
    HC,
    REGISTRY,
    BlockAttnRes,
    FullAttnRes,
    MoDA,
    PreLN,
    init_params,
    layered,
)

pytestmark = pytest.mark.jax_version

LENGTH, WIDTH = 5, 8

# One of each family, and what cuts a block, fills up shorter chunks, or takes more microbatches.
CASES = {
    "block": (BlockAttnRes(block_size_sublayers=3), 4, Schedule(2, 2, 2), Remat()),
    "full": (FullAttnRes(), 5, Schedule(4, 1, 4), Remat("layer")),
    "depth cache, uneven": (MoDA(), 5, Schedule(2, 2, 2), Remat()),
    "streams": (HC(streams=2), 4, Schedule(2, 1, 4), Remat("group", 2)),
    "stream": (PreLN(), 4, Schedule(4, 1, 8), Remat("sublayer")),
}


PAPERS = [(2, 2, 4), (4, 2, 8), (4, 4, 16), (2, 4, 8)]
"""(P, V, N): stages, passes, blocks; one block a chunk."""


def on_stages(stages):
    mesh = jax.make_mesh(
        (stages,), ("stage",), axis_types=(AxisType.Auto,), devices=jax.devices()[:stages]
    )
    return jax.set_mesh(mesh)


def random_like(tree):
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    normal = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, [x + 0.3 * n for x, n in zip(leaves, normal, strict=True)])


def attend(w, x, ctx):
    """Stands for attention: a function of its input and of the live entries of a depth cache."""
    y = jnp.tanh(w * x)
    if ctx is not None:
        keys, values, count = ctx
        live = (jnp.arange(len(keys)) < count).astype(x.dtype)
        y += jnp.einsum("n,nbtke,nbtke->bte", live, jnp.tanh(keys), values)
    return y, (y[..., None, :], x[..., None, :])


def check_against_one_place(rule, layers, schedule, remat=Remat(), keeps="all"):  # noqa: B008
    """The features, and the gradients by all parameters and the embedding, in float64."""
    rule = rule.bind(layers, (1, WIDTH))
    with jax.enable_x64(True):
        make = functools.partial(init_params, layers=layers, width=WIDTH, param_dtype=jnp.float64)
        stored = make(rule, jax.random.key(0))
        stored = random_like(jax.tree.map(lambda x: x.astype(jnp.float64), stored))
        branches = (random_like(jnp.ones((layers, WIDTH))),) * 2
        x = random_like(jnp.zeros((2 * schedule.microbatches, LENGTH, WIDTH)))
        sublayers = Sublayers(rule, (attend, lambda w, x, ctx: (jnp.sin(w * x), None)))

        def features(over_depth, stored, branches, x):
            params = layered(rule, stored, layers=layers, width=WIDTH)
            result = over_depth(sublayers, params, branches, x, layers=layers, remat=remat)[0]
            return jnp.sum(result * jnp.cos(jnp.arange(WIDTH))) / len(x), result

        def both(over_depth):
            compute = jax.value_and_grad(
                functools.partial(features, over_depth), argnums=(0, 1, 2), has_aux=True
            )
            (_, result), gradients = jax.jit(compute)(stored, branches, x)
            return jax.tree.map(np.asarray, (result, gradients))

        expected = both(run_depth)
        with on_stages(schedule.stages):
            found = both(functools.partial(run_stages, schedule, keeps=keeps))

    def compare(path, a, b):
        worst, size = np.max(np.abs(a - b)), np.max(np.abs(b))
        assert worst <= 1e-10 * size, f"{jax.tree_util.keystr(path)}: off by {worst} of {size}"

    jax.tree_util.tree_map_with_path(compare, found, expected)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_are_those_of_one_place(case):
    check_against_one_place(*case)


@pytest.mark.proof
@pytest.mark.parametrize("schedule", [Schedule(2, 2, 4), Schedule(4, 2, 4)], ids=str)
@pytest.mark.parametrize("rule", [make() for make in REGISTRY.values()], ids=REGISTRY)
def test_every_variant_is_that_of_one_place(rule, schedule):
    check_against_one_place(rule, 9, schedule)


@pytest.mark.proof
@pytest.mark.parametrize("keeps", ["nothing", "received"])
def test_what_stages_keep_changes_nothing_else(keeps):
    check_against_one_place(BlockAttnRes(block_size_sublayers=3), 6, Schedule(2, 3, 4), keeps=keeps)


def moved(rule, layers, schedule, keeps, backward):
    """{part: bytes that its permutes move, a token} of a compiled step with branches x -> w x."""
    rule = rule.bind(layers)
    params = init_params(rule, jax.random.key(0), layers=layers, width=WIDTH)
    params = layered(rule, params, layers=layers, width=WIDTH)
    sublayers = Sublayers(rule, (lambda w, x, ctx: (w * x, None),) * 2)
    x = jnp.ones((schedule.microbatches, LENGTH, WIDTH))

    def total(branches, x):
        over = functools.partial(run_stages, schedule, layers=layers, keeps=keeps)
        return jnp.sum(over(sublayers, params, branches, x)[0])

    branches = (jnp.ones((layers, WIDTH)),) * 2
    with on_stages(schedule.stages):
        program = jax.jit(jax.grad(total, argnums=(0, 1)) if backward else total)
        compiled = parse(program.lower(branches, x).compile().as_text())
    parts = "rows", "carry", "ends"
    return {p: permuted_bytes(compiled, f"hand_off_{p}") / x.size * WIDTH for p in parts}


def check_bytes(case, keeps, backward):
    """A chunk is one layer, a block two sublayers. The open sum travels C - 1 times, and 5 bytes of
    counters of a microbatch with it; going backward, all but these once more."""
    stages, virtual, blocks = case
    schedule, row = Schedule(stages, virtual, stages), 4 * WIDTH
    found = moved(BlockAttnRes(block_size_sublayers=2), blocks, schedule, keeps, backward)
    ways, hand_offs = 1 + backward, schedule.chunks - 1
    assert found["rows"] == ways * row * formula(keeps, stages, virtual, blocks / schedule.chunks)
    assert found["carry"] == pytest.approx(hand_offs * (ways * row + 5 / LENGTH))


@pytest.mark.parametrize("case", PAPERS, ids=str)
def test_bytes_moved_are_the_papers_formula(case):
    check_bytes(case, "received", backward=True)


@pytest.mark.parametrize("keeps", ["nothing", "all"])
def test_bytes_moved_without_a_cache_and_with_all_of_it(keeps):
    check_bytes((4, 2, 8), keeps, backward=True)


@pytest.mark.proof
@pytest.mark.parametrize("keeps", ["nothing", "received", "all"])
@pytest.mark.parametrize("case", PAPERS, ids=str)
def test_bytes_moved_forward_are_the_formula(case, keeps):
    check_bytes(case, keeps, backward=False)


@pytest.mark.parametrize("stages", [2, 4])
def test_a_stage_keeps_one_history_a_microbatch_and_the_carry_of_each_tick(stages):
    """Whatever the chunks hold inside, and however many passes read the history: its rows in front
    of the last chunk."""
    layers, schedule = 16, Schedule(stages, 2, 2 * stages)
    rule = BlockAttnRes(block_size_sublayers=4).bind(layers)
    params = init_params(rule, jax.random.key(0), layers=layers, width=WIDTH)
    params = layered(rule, params, layers=layers, width=WIDTH)
    branches = (jnp.ones((layers, WIDTH)),) * 2
    x = jnp.ones((2 * schedule.microbatches, LENGTH, WIDTH))
    sublayers = Sublayers(rule, (lambda w, x, ctx: (w * x, None),) * 2)

    def kept(params, branches, x):
        run = functools.partial(run_stages, schedule, sublayers, layers=layers)
        return jax.tree.leaves(jax.vjp(lambda *a: run(*a)[0], params, branches, x)[1])

    with on_stages(stages):
        found = jax.eval_shape(kept, params, branches, x)
    microbatch = (2, LENGTH, WIDTH)
    sizes = [leaf.shape for leaf in found if leaf.shape[-3:] == microbatch]
    assert sorted(sizes, key=len) == [
        (stages, 2, *microbatch),  # the embeddings
        (stages, schedule.ticks, *microbatch),
        (stages, schedule.microbatches, 8 - 8 // schedule.chunks, *microbatch),
    ]
