"""Checkpoints on disk: complete or not there, never overwritten, and refused in one sentence."""

import sys

import ml_dtypes
import numpy as np
import pytest

from depthjax.errors import InputError
from depthjax.interop import files
from depthjax.interop.files import check_free, read_tensors, write_checkpoint

TENSORS = {
    "half": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
    "turned": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "long": np.arange(3),
    "none": np.zeros((0, 4), np.float32),
    "scalar": np.array(2.5, np.float32),
}


def assert_equal(found):
    assert found.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize("out", ["folder", "deep/in/a.folder", "file.safetensors"])
def test_tensors_survive_in_every_dtype_and_layout(tmp_path, out):
    write_checkpoint(tmp_path / out, TENSORS, {"a": 1})
    assert_equal(read_tensors(tmp_path / out))
    assert files.read_json(files.config_beside(tmp_path / out)) == {"a": 1}


@pytest.mark.parametrize("out", ["folder", "file.safetensors"])
def test_nothing_is_overwritten(tmp_path, out):
    write_checkpoint(tmp_path / out, TENSORS, {})
    with pytest.raises(InputError, match="exists already: remove it"):
        write_checkpoint(tmp_path / out, TENSORS, {})


def test_a_config_is_not_overwritten_either(tmp_path):
    (tmp_path / "file.json").write_text("{}")
    with pytest.raises(InputError, match=r"file\.json exists already"):
        check_free(tmp_path / "file.safetensors")


@pytest.mark.parametrize("out", ["folder", "file.safetensors"])
def test_interrupted_writing_leaves_nothing(tmp_path, monkeypatch, out):
    def interrupted(whole, path, **options):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / out, TENSORS, {})
    assert list(tmp_path.iterdir()) == []


def test_truncated_file(tmp_path):
    write_checkpoint(tmp_path / "a.safetensors", TENSORS, {})
    data = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(data[:-3])
    with pytest.raises(InputError, match=r"b\.safetensors cannot be read"):
        read_tensors(tmp_path / "b.safetensors")


def test_dtype_without_counterpart(tmp_path):
    write_checkpoint(tmp_path / "a.safetensors", {"small": np.zeros(4, np.int8)}, {})
    data = (tmp_path / "a.safetensors").read_bytes()
    header = data[8:].partition(b"}}")[0].replace(b'"I8"', b'"F8_E4M3"') + b"}}"
    header += b" " * (-len(header) % 8)
    (tmp_path / "b.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(InputError, match=r"small in .* has dtype F8_E4M3: give one in BF16"):
        read_tensors(tmp_path / "b.safetensors")


@pytest.mark.parametrize(
    ("name", "words"),
    [("nothing.pt", "does not exist"), ("a.gguf", "ends in '.gguf'"), ("", "holds no checkpoint")],
)
def test_what_is_no_checkpoint(tmp_path, name, words):
    (tmp_path / "a.gguf").write_bytes(b"")
    with pytest.raises(InputError, match=words):
        read_tensors(tmp_path / name)


@pytest.mark.parametrize("text", ["[1]", "{", "", "[" * 100_000])
def test_what_is_no_config(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=r"a\.json"):
        files.read_json(tmp_path / "a.json")


@pytest.mark.parametrize("index", ["{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_what_is_no_index(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InputError, match=r"index\.json has no weight_map that says"):
        read_tensors(tmp_path)


def test_texts_beside_the_tensors(tmp_path):
    write_checkpoint(tmp_path / "out", TENSORS, {}, {"residual.py": "x = 1\n"})
    assert (tmp_path / "out" / "residual.py").read_text() == "x = 1\n"
    with pytest.raises(InputError, match="give the name of a folder"):
        write_checkpoint(tmp_path / "a.safetensors", TENSORS, {}, {"residual.py": "x = 1\n"})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_torch_file_without_torch(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "a.pt").write_bytes(b"")
    for use in (read_tensors, lambda path: check_free(path.with_name("b.pt"))):
        with pytest.raises(InputError, match=r"torch is not installed: `pip install torch`"):
            use(tmp_path / "a.pt")


def test_torch_files(tmp_path):
    torch = pytest.importorskip("torch")
    write_checkpoint(tmp_path / "a.pt", TENSORS, {})
    assert_equal(read_tensors(tmp_path / "a.pt"))
    torch.save({"model": torch.load(tmp_path / "a.pt"), "step": 3}, tmp_path / "b.pt")
    assert_equal(read_tensors(tmp_path / "b.pt"))
    torch.save([1], tmp_path / "c.pt")
    with pytest.raises(InputError, match="holds a list: give a state dict"):
        read_tensors(tmp_path / "c.pt")
    (tmp_path / "d.pt").write_bytes(b"no pickle")
    with pytest.raises(InputError, match=r"d\.pt cannot be read"):
        read_tensors(tmp_path / "d.pt")
