"""Training over the stages of a pipeline, beside other axes of the mesh, is that of one device."""

import functools

import numpy as np
import pytest
from on_mesh import program_of, small, steps

from depthjax.config import Config, MeshConfig, RunConfig
from depthjax.errors import InputError
from depthjax.parallel import make_mesh
from depthjax.residuals import REGISTRY

pytestmark = pytest.mark.jax_version

MESHES = {
    "stage=2,V=2,tensor=2,data=2": {"data": 2, "stage": 2, "virtual_stages": 2, "tensor": 2},
    "stage=4,data=2": {"data": 2, "stage": 4},
}
every_mesh = pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)


def three_steps(program):
    """Losses and gradient norms, and the loss of held-out rows after the steps."""
    state, seen = steps(program, program.init())
    ids = np.random.default_rng(3).integers(0, 64, (8, 16), np.int32)
    lengths = np.array([16, 9, 0, 16, 16, 2, 16, 16], np.int32)
    heldout = program.heldout(state.params, program.put(ids), program.put(lengths))
    return [*seen.reshape(-1), float(heldout)]


@functools.cache
def alone(name):
    return three_steps(program_of(small(REGISTRY[name]()), devices=1))


def check(name, mesh):
    found = three_steps(program_of(small(REGISTRY[name](), **mesh)))
    np.testing.assert_allclose(found, alone(name), rtol=1e-4)


@every_mesh
def test_three_steps_are_those_of_one_device(mesh):
    check("block_attnres", mesh)


@pytest.mark.proof
@every_mesh
@pytest.mark.parametrize("name", REGISTRY)
def test_every_variant_trains_as_on_one_device(name, mesh):
    check(name, mesh)


def test_layers_lie_on_their_stages():
    program = program_of(small(REGISTRY["pre_ln"](), data=1, stage=4, fsdp=2))
    for tree in (program.shardings.params, program.shardings.opt[1].mu):
        assert tree["mlp"]["gate"].shard_shape((4, 32, 48)) == (1, 16, 48)


def test_what_needs_the_whole_depth_is_refused():
    config = Config(mesh=MeshConfig(stage=2), run=RunConfig(depth_sizes=True))
    with pytest.raises(InputError, match=r"run\.depth_sizes is true, but with mesh\.stage 2"):
        make_mesh(config)
