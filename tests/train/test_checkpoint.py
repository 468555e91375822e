"""Checkpoints: exact, on any mesh, and past damage."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from depthjax.errors import InputError
from depthjax.train.checkpoint import Checkpoints, fingerprint, parameters_sha256
from depthjax.train.step import Program

pytestmark = pytest.mark.jax_version


def program_on(config, devices):
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
    return Program(config, 8192, mesh)


def trained(config, steps=1):
    program = program_on(config, 8)
    state = program.init()
    ids = np.random.default_rng(0).integers(0, 8192, (8, 32), np.int32)
    for _ in range(steps):
        state, _ = program.step(state, program.put(ids))
    return program, state


def saved(folder, state, steps=(1,)):
    checkpoints = Checkpoints(folder, keep=2, say=print)
    for step in steps:
        checkpoints.save(step, state, {"config": {}, "number": step})
    checkpoints.close()


def restore(folder, program, say=print):
    checkpoints = Checkpoints(folder, keep=2, say=say)
    try:
        return checkpoints.restore(program.abstract_state(), lambda meta: True)
    finally:
        checkpoints.close()


@pytest.mark.parametrize("devices", [8, 1, 2])
def test_round_trip_also_onto_another_mesh(small_config, tmp_path, devices):
    _, state = trained(small_config)
    saved(tmp_path, state)
    other = program_on(small_config, devices)
    loaded, meta = restore(tmp_path, other)
    jax.tree.map(np.testing.assert_array_equal, loaded, state)
    assert (meta["config"], meta["number"]) == ({}, 1)
    assert all(leaf.sharding.mesh.size == devices for leaf in jax.tree.leaves(loaded.params))


def test_saved_state_is_that_of_the_moment(small_config, tmp_path):
    """The step that follows reuses the buffers; the checkpoint must not see it."""
    program, state = trained(small_config)
    checkpoints = Checkpoints(tmp_path, keep=9, say=print)
    hashes = {}
    ids = np.random.default_rng(0).integers(0, 8192, (8, 32), np.int32)
    for step in range(1, 7):
        hashes[step] = parameters_sha256(state.params)
        checkpoints.save(step, state, {"config": {}})
        state, _ = program.step(state, program.put(ids))
    checkpoints.close()
    assert len(set(hashes.values())) == 6
    for step in range(6, 0, -1):
        loaded, _ = restore(tmp_path, program)
        assert parameters_sha256(loaded.params) == hashes[int(loaded.step)] == hashes[step]
        for file in (tmp_path / str(step)).rglob("*"):
            if file.is_file():
                file.unlink()


def test_fingerprint_sees_every_bit(small_config):
    """Any one flipped bit, two exchanged numbers, and nothing else; the same on any mesh."""
    _, state = trained(small_config)
    leaves = {"a": np.array(state.params["head"]), "b": np.arange(6, dtype=np.float32)}
    first = np.asarray(fingerprint(leaves))
    for bit in range(32):
        changed = {**leaves, "a": leaves["a"].copy()}
        changed["a"].view(np.uint32)[5, 77] ^= 1 << bit
        assert np.array_equal(np.asarray(fingerprint(changed)) != first, [True, False])
    exchanged = {**leaves, "b": leaves["b"][[0, 2, 1, 3, 4, 5]]}
    assert np.array_equal(np.asarray(fingerprint(exchanged)) != first, [False, True])
    mesh = program_on(small_config, 8).by_row
    sharded = {**leaves, "a": jax.device_put(leaves["a"], mesh)}
    np.testing.assert_array_equal(fingerprint(sharded), first)


def test_sha256_sees_every_bit_and_every_name(small_config):
    _, state = trained(small_config)
    params = jax.device_get(state.params)
    first = parameters_sha256(params)
    assert parameters_sha256(dict(reversed(params.items()))) == first
    params["head"] = np.array(params["head"])
    params["head"].view(np.uint32)[0, 0] ^= 1
    assert parameters_sha256(params) != first


def damage(path, how):
    """Truncates the largest file of a checkpoint, flips one bit in it, or removes its metadata."""
    files = sorted((f for f in path.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    if how == "truncated":
        with files[-1].open("r+b") as file:
            file.truncate(files[-1].stat().st_size // 2)
    elif how == "one bit":
        data = bytearray(files[-1].read_bytes())
        data[len(data) // 2] ^= 4
        files[-1].write_bytes(data)
    else:
        (path / "_CHECKPOINT_METADATA").unlink()


@pytest.mark.parametrize("how", ["truncated", "one bit", "no metadata"])
def test_falls_back_past_a_damaged_checkpoint(small_config, tmp_path, how):
    program, state = trained(small_config)
    saved(tmp_path, state, steps=(1, 2))
    damage(tmp_path / "2", how)
    said = []
    loaded, meta = restore(tmp_path, program, said.append)
    assert meta["number"] == 1
    assert len(said) == 1
    assert said[0].startswith("checkpoint 2 cannot be read")
    jax.tree.map(np.testing.assert_array_equal, loaded, state)
    assert (tmp_path / "2").exists()


def test_nothing_readable_is_an_error_and_deletes_nothing(small_config, tmp_path):
    program, state = trained(small_config)
    saved(tmp_path, state, steps=(1, 2))
    damage(tmp_path / "1", "truncated")
    damage(tmp_path / "2", "no metadata")
    with pytest.raises(InputError, match=r"none of the checkpoints \[1, 2\]"):
        restore(tmp_path, program)
    assert (tmp_path / "1").exists()
    assert (tmp_path / "2").exists()


def test_unfinished_checkpoint_is_named_and_passed_over(small_config, tmp_path):
    program, state = trained(small_config)
    saved(tmp_path, state)
    (tmp_path / "2.orbax-checkpoint-tmp-1").mkdir()
    said = []
    _, meta = restore(tmp_path, program, said.append)
    assert meta["number"] == 1
    assert "never finished" in said[0]
