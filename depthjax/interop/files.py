"""Tensors and configs on disk: safetensors (also sharded), torch files, folders of the hub.

bf16 comes and goes as numpy arrays of ml_dtypes' bfloat16.
"""

import json
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from depthjax.data.files import partial_path, publish
from depthjax.errors import InputError
from depthjax.interop.tensors import Tensors

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    **{f"I{8 * size}": np.dtype(f"i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"u{size}") for size in (1, 2, 4, 8)},
    "BOOL": np.bool_,
}
_SAFE, _TORCH = ".safetensors", (".pt", ".pth", ".bin")
_SINGLE, _INDEX, _CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


def read_tensors(path: str | pathlib.Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors or torch file, or of a folder with `model.safetensors`, whole or
    in shards. InputError where there are none, or they cannot be read."""
    path = pathlib.Path(path)
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        raise InputError(f"{path} does not exist: give a checkpoint, a file or a folder")
    if path.suffix == _SAFE:
        return _read_safetensors(path)
    if path.suffix in _TORCH:
        return _read_torch(path)
    kinds = ", ".join((_SAFE, *_TORCH))
    raise InputError(f"{path} ends in {path.suffix!r}: give one of {kinds}, or a folder")


def _read_folder(folder: pathlib.Path) -> dict[str, np.ndarray]:
    index = folder / _INDEX
    if not index.is_file():
        if not (folder / _SINGLE).is_file():
            raise InputError(f"{folder} holds no checkpoint: give a folder with {_SINGLE}")
        return _read_safetensors(folder / _SINGLE)
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(p, str) for p in places.values()):
        raise InputError(
            f"{index} has no weight_map that says the file of each tensor by name: get it again"
        )
    tensors: dict[str, np.ndarray] = {}
    for shard in sorted(set(places.values())):
        if not (folder / shard).is_file():
            raise InputError(f"{index} names {shard}, which is not there: get it again")
        tensors |= _read_safetensors(folder / shard)
    return tensors


def _read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Views into the file, so that nothing is in memory before it is used."""
    try:
        with safe_open(path, framework="numpy"):  # checks the header against the file's size
            pass
    except SafetensorError as error:
        raise InputError(f"{path} cannot be read ({error}): get or write it again") from error
    data = np.memmap(path, np.uint8, mode="r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise InputError(
                f"{name} in {path} has dtype {entry['dtype']}: give one in BF16, F16 or F32"
            )
        first, last = (start + offset for offset in entry["data_offsets"])
        tensors[name] = data[first:last].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def _torch(path: pathlib.Path) -> Any:
    try:
        import torch
    except ImportError as error:
        raise InputError(
            f"{path} is a torch file, and torch is not installed: `pip install torch`, or give a "
            f"{_SAFE} file"
        ) from error
    return torch


def _read_torch(path: pathlib.Path) -> dict[str, np.ndarray]:
    """A state dict, as it is or under the key "model"; nothing in the file is executed."""
    torch = _torch(path)
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling raises many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"{path} cannot be read ({reason}): give a file that holds tensors alone"
        ) from error
    if isinstance(loaded, dict) and isinstance(loaded.get("model"), dict):
        loaded = loaded["model"]
    if not isinstance(loaded, dict):
        raise InputError(f"{path} holds a {type(loaded).__name__}: give a state dict")

    def array(tensor: Any) -> np.ndarray:
        tensor = tensor.detach().contiguous()
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    return {name: array(value) for name, value in loaded.items() if torch.is_tensor(value)}


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object; InputError for anything else."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON ({error})") from error
    except RecursionError as error:
        raise InputError(f"{path} cannot be read as JSON (it is nested too deeply)") from error
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no JSON object: give a config with its keys")
    return values


def config_beside(path: str | pathlib.Path) -> pathlib.Path:
    """Where the config of a checkpoint lives: in its folder, or under its name with .json."""
    path = pathlib.Path(path)
    return path.with_suffix(".json") if is_file_name(path) else path / _CONFIG


def is_file_name(path: pathlib.Path) -> bool:
    """Whether a checkpoint at `path` is a file of tensors; else it is a folder."""
    return path.is_file() or (path.suffix in (_SAFE, *_TORCH) and not path.is_dir())


def check_free(out: str | pathlib.Path) -> None:
    """Raises InputError where a checkpoint written to `out` would overwrite something."""
    out = pathlib.Path(out)
    places = (out, config_beside(out)) if is_file_name(out) else (out,)
    for place in places:
        if place.exists() or place.is_symlink():
            raise InputError(f"{place} exists already: remove it, or give another name")
    if out.suffix in _TORCH:
        _torch(out)


def write_checkpoint(
    out: str | pathlib.Path,
    tensors: Tensors,
    values: dict[str, Any],
    beside: Mapping[str, str] | None = None,
) -> None:
    """Tensors and config: two files where `out` ends in .safetensors or .pt, else a folder. beside:
    texts by file name that are kept in the folder.

    All of it appears at once, or nothing does; nothing is overwritten (InputError).
    """
    out = pathlib.Path(out)
    check_free(out)
    if beside and is_file_name(out):
        raise InputError(
            f"{out} is to be a file, but {', '.join(beside)} has to be kept beside it: give the "
            "name of a folder"
        )
    out.parent.mkdir(parents=True, exist_ok=True)

    def save(path: pathlib.Path, kind: str) -> None:
        _save_tensors(path, tensors, kind)

    def describe(path: pathlib.Path) -> None:
        path.write_text(json.dumps(values, indent=2) + "\n")

    if is_file_name(out):
        _appear({out: lambda path: save(path, out.suffix), config_beside(out): describe})
        return

    def fill(folder: pathlib.Path) -> None:
        folder.mkdir()
        save(folder / _SINGLE, _SAFE)
        describe(folder / _CONFIG)
        for name, text in (beside or {}).items():
            (folder / name).write_text(text, encoding="utf-8")

    _appear({out: fill})


def _save_tensors(path: pathlib.Path, tensors: Tensors, kind: str) -> None:
    whole = {name: np.asarray(value, order="C") for name, value in tensors.items()}
    if kind == _SAFE:
        save_file(whole, path, metadata={"format": "pt"})  # which the hub's loaders ask for
        return
    torch = _torch(path)

    def tensor(value: np.ndarray) -> Any:
        if value.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(value.copy())

    torch.save({name: tensor(value) for name, value in whole.items()}, path)


def _appear(writers: dict[pathlib.Path, Callable[[pathlib.Path], None]]) -> None:
    """Writes each file or folder under a hidden name, and gives all their own names at the end."""
    partials = {path: partial_path(path) for path in writers}
    try:
        for path, write in writers.items():
            write(partials[path])
        for partial in partials.values():
            for file in (partial, *partial.rglob("*")):
                _flush(file)
        for path, partial in partials.items():
            publish(partial, path)
    finally:
        for partial in partials.values():
            if partial.is_dir():
                shutil.rmtree(partial, ignore_errors=True)
            else:
                partial.unlink(missing_ok=True)


def _flush(path: pathlib.Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
