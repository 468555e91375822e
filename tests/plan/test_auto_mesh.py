"""The mesh that `--mesh auto` chooses."""

import dataclasses
from types import SimpleNamespace

import pytest

from depthjax.config import Config, MeshConfig, ModelConfig, TrainConfig
from depthjax.errors import InputError
from depthjax.parallel import mesh_sizes
from depthjax.plan import with_mesh


def devices(count, kind="TPU v5 lite"):
    return [SimpleNamespace(device_kind=kind, slice_index=0)] * count


def chosen(count, kind="TPU v5 lite", batch=512, accumulate=1, shape="400m-L32", **mesh):
    config = Config(
        model=ModelConfig(shape=shape, vocab=50280),
        train=TrainConfig(batch=batch, accumulate=accumulate),
        mesh=MeshConfig(auto=True, **mesh),
    )
    found = with_mesh(config, devices(count, kind)).mesh
    assert not found.auto
    sizes = mesh_sizes(dataclasses.replace(config, mesh=found), count)
    return {axis: size for axis, size in sizes.items() if size > 1}


def test_data_alone_where_the_model_fits():
    assert chosen(8, batch=8) == {"data": 8}
    assert chosen(8, kind="cpu") == {"data": 8}  # of unknown memory


def test_states_are_divided_where_they_do_not_fit():
    """1.6B parameters with Adam in fp32 are 26 GB, and a v5e has 15.75 GiB: fsdp, but no more."""
    found = chosen(16, batch=16, shape="1.6b-L28")
    assert found["fsdp"] >= 2
    assert "tensor" not in found


def test_products_are_divided_where_the_batch_does_not_reach():
    assert chosen(16, batch=4)["tensor"] == 4


def test_what_is_given_stays():
    assert chosen(16, batch=8, sequence=2)["sequence"] == 2


def test_no_mesh_is_one_sentence():
    with pytest.raises(InputError, match="does not divide the 2 sequences"):
        chosen(7, batch=2)


@pytest.mark.parametrize("given", [{"sequence": -1}, {"stage": 0}])
def test_what_is_not_chosen_has_a_size(given):
    with pytest.raises(InputError, match=r"but mesh\.auto chooses data, fsdp and tensor alone"):
        chosen(8, **given)


def test_what_is_chosen_is_not_given():
    with pytest.raises(InputError, match=r"mesh\.fsdp is 4, but mesh\.auto chooses it"):
        chosen(8, fsdp=4)
