"""Meshes: filled in, refused in a sentence that names one that works, and slices along data."""

import dataclasses
import math
from types import SimpleNamespace

import pytest

from depthjax.config import Config, MeshConfig, ModelConfig, TrainConfig
from depthjax.errors import InputError
from depthjax.overrides import override
from depthjax.parallel import AXES, make_mesh, mesh_sizes
from depthjax.parallel.mesh import arranged

MODEL = ModelConfig(
    shape="custom", layers=4, width=32, heads=4, kv_heads=4, mlp_width=48, context=16
)


def config(batch=16, accumulate=1, **sizes):
    train = TrainConfig(batch=batch, accumulate=accumulate)
    return Config(model=MODEL, train=train, mesh=MeshConfig(**sizes)).check()


def sizes(found):
    return {axis: size for axis, size in found.items() if size > 1}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {"data": 8}),
        ({"fsdp": 4}, {"data": 2, "fsdp": 4}),
        ({"fsdp": -1}, {"fsdp": 8}),
        ({"data": 2, "tensor": -1}, {"data": 2, "tensor": 4}),
        ({"sequence": 2, "tensor": 2}, {"data": 2, "sequence": 2, "tensor": 2}),
    ],
)
def test_what_is_left_is_filled_in(given, found):
    assert sizes(mesh_sizes(config(**given), 8)) == found
    mesh = make_mesh(config(**given))
    assert mesh.axis_names == AXES
    assert sizes(mesh.shape) == found
    assert len(set(mesh.devices.flat)) == 8


@pytest.mark.parametrize(
    ("given", "reason", "remedy"),
    [
        ({"fsdp": 3}, "makes 6 devices of the 8", "fsdp=4"),
        ({"fsdp": 16}, "makes 16 devices of the 8", "data=1,fsdp=8"),
        ({"tensor": 8}, "tensor = 8 does not divide the 4 heads", "data=2,tensor=4"),
        ({"stage": 8}, "stage * virtual_stages = 8 is more than 4 layers", "data=2,stage=4"),
        (
            {"stage": 2, "virtual_stages": 4},
            "stage * virtual_stages = 8 is more than 4 layers",
            "data=4,stage=2,virtual_stages=2",
        ),
        (
            {"stage": 8, "virtual_stages": 2, "microbatches": 8},
            "stage * virtual_stages = 16 is more than 4 layers",
            "data=2,stage=2,tensor=2,virtual_stages=2,microbatches=8",
        ),
        ({"batch": 12}, "data * fsdp = 8 does not divide the 12 sequences", "data=4,"),
        ({"batch": 16, "accumulate": 4}, "does not divide the 4 sequences", "data=4,"),
        ({"batch": 4, "stage": 3}, "makes 6 devices of the 8", "data=2,stage=2,tensor=2"),
        ({"batch": 4, "stage": 4}, "data * fsdp * microbatches = 8 does not", "data=1,stage=4"),
    ],
)
def test_a_bad_mesh_names_the_nearest_that_works(given, reason, remedy):
    with pytest.raises(InputError) as error:
        mesh_sizes(config(**given), 8)
    message = str(error.value)
    assert reason in message
    assert remedy in message.partition("the nearest that works is --mesh ")[2]
    named = dict(part.split("=") for part in message.rpartition("--mesh ")[2].split(","))
    fields = {name: given[name] for name in ("batch", "accumulate") if name in given}
    again = config(**fields, **{axis: int(size) for axis, size in named.items()})
    assert math.prod(mesh_sizes(again, 8).values()) == 8


def test_layers_need_not_divide_evenly_into_stages():
    """Only a chunk without any layer is refused."""
    given = config(stage=4, virtual_stages=2)
    for layers in (9, 15):
        model = dataclasses.replace(MODEL, layers=layers)
        assert mesh_sizes(dataclasses.replace(given, model=model), 8)["stage"] == 4


def test_two_axes_cannot_be_what_is_left():
    with pytest.raises(InputError, match=r"mesh\.fsdp and mesh\.tensor are both -1"):
        mesh_sizes(config(fsdp=-1, tensor=-1), 8)
    with pytest.raises(InputError, match=r"mesh\.fsdp is 0: give 1 or more, or -1"):
        mesh_sizes(config(fsdp=0), 8)


def test_slices_differ_along_data():
    """Two slices of four devices each: every other axis stays within one of them."""

    def device(number):
        return SimpleNamespace(
            id=number, slice_index=number // 4, process_index=0, platform="cpu", device_kind="cpu"
        )

    devices = [device(number) for number in range(8)]
    found = arranged(devices, (4, 1, 2, 1, 1))
    slices = [[device.slice_index for device in row.flat] for row in found]
    assert slices == [[0, 0], [0, 0], [1, 1], [1, 1]]
    with pytest.raises(InputError, match="data has to be a multiple of the 2 slices"):
        make_mesh(config(fsdp=8), devices)


def test_a_short_spelling():
    def load(shape, residual):
        return config(tensor=4)

    found = override(load, ["--mesh", "fsdp=2,tensor=-1", "--mesh.data=2"], "test").mesh
    assert found == MeshConfig(data=2, fsdp=2, tensor=-1)
    assert override(load, ["--mesh=auto"], "test").mesh == MeshConfig(tensor=4, auto=True)
    assert override(load, ["--mesh", "data=1"], "test").mesh == MeshConfig(data=1)
    for wrong in ("fsdp", "fsdp=two", "depth=2", ""):
        with pytest.raises(InputError, match=r"write auto, or sizes such as data=2,fsdp=4"):
            override(load, ["--mesh", wrong], "test")
    with pytest.raises(InputError, match="says fsdp twice"):
        override(load, ["--mesh", "fsdp=2,fsdp=4"], "test")
