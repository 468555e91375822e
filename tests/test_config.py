"""Configs: their files, their JSON form, and what is wrong with them in one sentence."""

import dataclasses
import json
import pathlib

import pytest

from depthjax.config import (
    Config,
    ModelConfig,
    RunConfig,
    TrainConfig,
    flatten,
    from_dict,
    from_json,
    load_config,
    to_dict,
)
from depthjax.errors import InputError
from depthjax.models import SHAPES
from depthjax.residuals import REGISTRY, BlockAttnRes, FullAttnRes, PreLN
from depthjax.train.run_dir import RunDirectory, check_unchanged, saved_config

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"


@pytest.mark.parametrize("name", REGISTRY)
def test_json_round_trip(name):
    config = Config(model=ModelConfig(residual=REGISTRY[name](eps=1e-5), vocab=100))
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_json_from_before_the_policies(tmp_path):
    """Runs of old said model.remat true or false."""
    values = to_dict(Config())
    for old, new in ((True, "layer"), (False, "none")):
        values["model"]["remat"] = old
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert from_json(tmp_path / "config.json").check().model.remat == new


def test_unknown_field_in_json():
    values = to_dict(Config())
    values["train"]["stepz"] = 3
    with pytest.raises(
        InputError, match=r"field 'stepz' is unknown to TrainConfig.*did you mean steps"
    ):
        from_dict(values)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_config_files_are_right_as_they_stand(file):
    load_config(str(file)).check()


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "tiny-L8"])
@pytest.mark.parametrize("residual", REGISTRY)
def test_study_follows_its_two_dials(shape, residual):
    """DepthBench, section 2: steps by size; peak rate 2e-3, for LNS 1e-2, for DeepNorm
    1e-3, and at 1.6B 5e-4."""
    config = load_config(str(CONFIGS / "depthbench.py"), shape, residual).check()
    assert (config.model.shape, config.residual.name) == (shape, residual)
    steps = {"200m": 3800, "300m": 5700, "500m": 9500, "1.6b": 30400}
    family = shape.rpartition("-")[0]
    assert config.train.steps == steps.get(family, 7600)
    assert config.warmup_steps == config.train.steps // 10
    peak = {"lns": 1e-2, "deepnorm": 1e-3}.get(residual, 2e-3)
    assert config.peak_lr == (5e-4 if family == "1.6b" else peak)
    assert config.train.batch * config.model.context == 512 * 2048
    assert getattr(config.residual, "mix_eps", 1e-5) == 1e-5


def test_study_has_its_own_shapes_only():
    with pytest.raises(InputError, match=r"model\.shape is 'tiny-L8'"):
        load_config(str(CONFIGS / "depthbench.py"), "tiny-L8")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", r"has no config\(\) that works"),
        ("def config(:", r"has no config\(\) that works"),
        ("raise KeyError(3)", r"has no config\(\) that works: KeyError: 3"),
        ("import sys\nsys.exit(7)", r"has no config\(\) that works: SystemExit: 7"),
        ("import nonsense_module", r"has no config\(\) that works"),
        ("def config():\n    return 3", "returns int: return a depthjax.config.Config"),
        (
            "from depthjax.config import *\ndef config():\n    return Config(modle=1)",
            "modle",
        ),
    ],
)
def test_wrong_config_files(tmp_path, source, message):
    file = tmp_path / "wrong.py"
    file.write_text(source)
    with pytest.raises(InputError, match=message):
        load_config(str(file))


def test_a_config_file_may_define_a_variant(tmp_path):
    """Its module is where Python's dataclasses look it up."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\n"
        "import dataclasses\n"
        "from depthjax.config import Config, ModelConfig\n"
        "from depthjax.residuals import PreLN\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Mine(PreLN):\n"
        "    name = 'mine'\n"
        "    gain: float = 2.0\n"
        "def config():\n"
        "    return Config(model=ModelConfig(residual=Mine()))\n"
    )
    config = load_config(str(file)).check()
    assert config.residual.gain == 2.0
    with RunDirectory(str(tmp_path / "run")) as directory:  # which keeps the file
        directory.write_origin(config)
    file.unlink()
    del REGISTRY["mine"]
    assert saved_config(str(tmp_path / "run")).residual.gain == 2.0


def test_a_config_from_before_the_mesh_still_loads(tmp_path):
    values = to_dict(Config(train=TrainConfig(steps=7)))
    del values["mesh"]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    assert from_json(file) == Config(train=TrainConfig(steps=7))


def test_two_variants_cannot_share_a_name():
    with pytest.raises(ValueError, match="'pre_ln' names PreLN already: take another"):
        type("Other", (PreLN,), {"name": "pre_ln"})


CUSTOM = {"shape": "custom", "layers": 2, "width": 64, "heads": 4, "mlp_width": 96}


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        (
            "model",
            {"shape": "400m-L23"},
            "model.shape is '400m-L23', .* try 400m-L16, 400m-L20, .* or 'custom'",
        ),
        ("model", {"shape": "custom"}, "model.shape is custom, which needs model.layers, "),
        ("model", {"width": 100}, "model.width is 100, but model.shape tiny-L8 makes it 128"),
        ("model", {**CUSTOM, "heads": 5}, "model.heads is 5, which does not divide model.width 64"),
        ("model", {**CUSTOM, "kv_heads": 3}, "model.kv_heads is 3, .* divide model.heads 4"),
        ("model", {"kv_heads": 0}, "model.kv_heads is 0: give a positive integer"),
        ("model", {"context": 1}, "model.context is 1: give 2 or more"),
        (
            "model",
            {"residual": BlockAttnRes(block_size_sublayers=17)},
            "model.residual: block_size_sublayers is 17, .* choose 1 to 16",
        ),
        ("train", {"batch": 30, "accumulate": 4}, "train.batch is 30, .*train.accumulate 4"),
        ("train", {"batch": 0}, "train.batch is 0: give 1 or more"),
        ("train", {"steps": 0}, "train.steps is 0: give 1 or more"),
        (
            "train",
            {"warmup_steps": 2000},
            r"train.warmup_steps is 2000: give 0 to train.steps \(1000",
        ),
        ("train", {"peak_lr": 0.0}, "train.peak_lr is 0.0: give a positive number"),
        ("train", {"peak_lr": float("nan")}, r"train.peak_lr is nan: give float \| None, finite"),
        ("train", {"weight_decay": -0.1}, "train.weight_decay is -0.1: give 0 or more"),
        ("train", {"beta2": 1.0}, r"train.beta2 is 1.0: give one in \[0, 1\)"),
        ("run", {"save_every": 0}, "run.save_every is 0: give 1 or more"),
        ("run", {"dir": ""}, "run.dir is empty: give a directory"),
        ("data", {"dir": ""}, "data.dir is empty: give a directory"),
        ("data", {"seed": -1}, "data.seed is -1: give 0 or more"),
        ("model", {"rope_theta": 0.0}, "model.rope_theta is 0.0: give a positive number"),
        ("model", {"init_std": float("inf")}, "model.init_std is inf: give float, finite"),
        ("model", {"residual": BlockAttnRes(eps=float("nan"))}, "model.residual.eps is nan: give"),
        ("model", {"residual": "pre_ln"}, "model.residual is 'pre_ln': give a Residual"),
        ("model", {"dtype": "float8"}, "model.dtype is 'float8': give one of bfloat16, float32"),
        ("train", {"steps": "2"}, "train.steps is '2': give int"),
        ("train", {"steps": 2.5}, "train.steps is 2.5: give int"),
        ("train", {"steps": 10**20}, "train.steps is 1000+: give int"),
        ("train", {"adam_eps": None}, "train.adam_eps is None: give float"),
    ],
)
def test_wrong_fields(part, fields, message):
    config = dataclasses.replace(
        Config(), **{part: dataclasses.replace(getattr(Config(), part), **fields)}
    )
    with pytest.raises(InputError, match=message):
        config.check()


def test_kv_heads_override_a_named_shape():
    config = Config(model=ModelConfig(shape="400m-L32", kv_heads=4))
    assert config.shape == dataclasses.replace(SHAPES["400m-L32"], kv_heads=4)


@pytest.mark.parametrize(
    ("change", "fixed"),
    [
        ({"model": ModelConfig(context=64)}, "model.context: 2048 -> 64"),
        ({"model": ModelConfig(residual=FullAttnRes())}, "model.residual.name: 'pre_ln' -> 'full"),
        ({"train": TrainConfig(batch=64)}, "train.batch: 32 -> 64"),
        ({"train": TrainConfig(steps=9, peak_lr=1.0)}, None),
        ({"run": RunConfig(dir="elsewhere", log_every=3)}, None),
        ({"model": ModelConfig(dtype="float32", remat="layer")}, None),
    ],
)
def test_what_may_change_in_a_run(change, fixed):
    old, new = Config(), Config(**change)
    if fixed:
        with pytest.raises(InputError, match="made with another config") as error:
            check_unchanged(to_dict(old), new)
        assert fixed in str(error.value)
    else:
        before, after = flatten(old), flatten(new)
        changed = {name for name in after if before[name] != after[name]}
        assert {note.partition(":")[0] for note in check_unchanged(to_dict(old), new)} == changed
