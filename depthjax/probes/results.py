"""The files of a measured checkpoint: one .npz a diagnostic, and meta.json."""

import dataclasses
import io
import json
import pathlib
import zipfile
from typing import Any

import numpy as np

from depthjax.data.files import write_atomically
from depthjax.errors import InputError

META = "meta.json"


@dataclasses.dataclass(frozen=True)
class Results:
    """What `measure` found; `measure` lists the arrays and the entries of `meta`."""

    arrays: dict[str, dict[str, np.ndarray]]
    """{diagnostic: {array name: float64}}, of the finished ones."""
    meta: dict[str, Any]

    @classmethod
    def load(cls, out_dir: str | pathlib.Path) -> "Results":
        """Reads what is in `out_dir`; InputError where `measure` has left nothing."""
        out_dir = pathlib.Path(out_dir)
        meta = read_meta(out_dir)
        if meta is None:
            raise InputError(f"{out_dir} holds no {META}: measure a checkpoint into it first")
        arrays = {name: read_arrays(out_dir / f"{name}.npz") for name in meta["done"]}
        return cls(arrays, meta)


def read_meta(out_dir: pathlib.Path) -> dict[str, Any] | None:
    """meta.json as it is; None where there is none. InputError where it is not of `measure`."""
    path = out_dir / META
    if not path.exists():
        return None
    try:
        meta = json.loads(path.read_text())
        if "fingerprint" in meta and "done" in meta:
            return meta
    except (ValueError, TypeError, OSError):
        pass
    raise InputError(f"{path} is not what `measure` writes: give another directory")


def write_meta(out_dir: pathlib.Path, meta: dict[str, Any]) -> None:
    write_atomically(out_dir / META, (json.dumps(meta, indent=1) + "\n").encode())


def read_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of a file; InputError where it is missing or damaged."""
    try:
        with open(path, "rb") as opened, np.load(opened) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} is missing or damaged: remove {path.parent} or it") from error


def write_arrays(path: pathlib.Path, arrays: dict[str, Any]) -> None:
    """All or nothing."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_atomically(path, buffer.getvalue())
