"""Training on a mesh is training: the same losses and gradient norms, and checkpoints that restore
onto any other mesh."""

import functools

import jax
import numpy as np
import pytest
from on_mesh import program_of, small, steps

from depthjax.residuals import REGISTRY
from depthjax.train.checkpoint import Checkpoints

pytestmark = pytest.mark.jax_version

MESHES = {
    "data8": {"data": 8},
    "fsdp8": {"fsdp": 8},
    "tensor4": {"tensor": 4},
    "sequence4": {"sequence": 4},
    "all": {"fsdp": 2, "sequence": 2, "tensor": 2},
}
PAIRS = [
    ("full_attnres", "fsdp8"),
    ("block_attnres", "tensor4"),
    ("moda", "sequence4"),
    ("hc", "all"),
]


@functools.cache
def alone(name):
    program = program_of(small(REGISTRY[name]()), devices=1)
    return steps(program, program.init())[1]


def check(name, mesh):
    program = program_of(small(REGISTRY[name](), **MESHES[mesh]))
    state, seen = steps(program, program.init())
    np.testing.assert_allclose(seen, alone(name), rtol=1e-4)
    lies = jax.tree.map(
        lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), state, program.shardings
    )
    assert all(jax.tree.leaves(lies))
    return state


@pytest.mark.parametrize(("name", "mesh"), PAIRS, ids=map("-".join, PAIRS))
def test_three_steps_on_a_mesh(name, mesh):
    state = check(name, mesh)
    if mesh == "fsdp8":  # a device holds an eighth of every matrix and of both its moments
        for tree in (state.params, state.opt[1].mu, state.opt[1].nu):
            matrix = tree["mlp"]["gate"]
            assert matrix.addressable_shards[0].data.size * 8 == matrix.size


@pytest.mark.proof
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", REGISTRY)
def test_three_steps_of_every_variant_on_every_mesh(name, mesh):
    check(name, mesh)


def test_a_checkpoint_continues_on_another_mesh(tmp_path):
    """Two steps on one mesh and two on another are four steps on one device."""
    rule = REGISTRY["block_attnres"]()
    reference = program_of(small(rule), devices=1)
    expected = steps(reference, reference.init(), range(4))[1]
    program = program_of(small(rule, fsdp=4, tensor=2))
    state, first = steps(program, program.init(), range(2))
    checkpoints = Checkpoints(tmp_path, keep=1, say=print)
    checkpoints.save(2, state, {"config": {}})
    checkpoints.close()
    other = program_of(small(rule, tensor=2), devices=4)
    checkpoints = Checkpoints(tmp_path, keep=1, say=print)
    restored, _ = checkpoints.restore(other.abstract_state(), lambda meta: True)
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    second = steps(other, restored, range(2, 4))[1]
    np.testing.assert_allclose(np.concatenate([first, second]), expected, rtol=1e-4)
