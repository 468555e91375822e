"""The run directory: its lock, its origin, and what may not change in it."""

import dataclasses
import errno
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import time
from typing import Any

import jax

from depthjax.config import OWN_VARIANT, Config, flatten, from_json, to_dict, variant_source
from depthjax.data.files import write_atomically
from depthjax.errors import InputError
from depthjax.parallel import processes

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")

# What a checkpoint cannot be loaded into, or where the order of the data or the start of the run
# would silently change.
_FIXED = ("model.", "data.tokenizer", "data.seed", "train.batch", "train.beta", "train.init_from")
_FREE = ("model.remat", "model.remat_group", "model.dtype", "model.init_std", "model.init_seed")


class RunDirectory:
    """A run's directory, created if need be and locked against a second writer until closed.

    Of several processes the first is the writer; in the others nothing is written. Raises
    InputError where it cannot be written to or another job is training in it.
    """

    def __init__(self, path: str):
        self.path, self._lock = pathlib.Path(path), None
        if set("[]\\") & set(str(self.path.absolute())):
            raise InputError(
                f"run.dir is {str(self.path.absolute())!r}: checkpoints cannot be written to a "
                "path with '[', ']' or a backslash in it, give another directory"
            )
        if processes.is_first():
            self._take(path)

    def _take(self, path: str) -> None:
        try:
            (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
            if not os.access(self.path / "checkpoints", os.W_OK):
                raise PermissionError(errno.EACCES, "no permission to write its checkpoints")
            self._lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise InputError(
                f"run.dir is {path!r}, which cannot be written to ({error.strerror}): "
                "give another directory"
            ) from error
        try:
            import fcntl

            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise InputError(
                f"run.dir is {path!r}, in which another process is training: wait for it, or give "
                "another directory"
            ) from error
        except (ImportError, OSError):
            pass  # no locks on this system or file system

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def write_origin(self, config: Config) -> None:
        """Saves the resolved config, and beside it versions, commit, processes and devices, and the
        source of a residual connection that is defined outside of depthjax."""
        if not processes.is_first():
            return
        self._write("config.json", to_dict(config))
        source = variant_source(config.model.residual)
        if source is not None:
            write_atomically(self.path / OWN_VARIANT, source.encode())
        environment = {
            "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
            "python": platform.python_version(),
            "git_commit": git_commit(),
            "image": os.environ.get("DEPTHJAX_IMAGE"),
            "processes": jax.process_count(),
            "devices": jax.device_count(),
            "device_kind": jax.devices()[0].device_kind,
        }
        self._write("environment.json", environment)

    def _write(self, name: str, values: dict[str, Any]) -> None:
        write_atomically(self.path / name, (json.dumps(values, indent=2) + "\n").encode())

    def note(self, event: str, **details: Any) -> None:
        """Appends to events.jsonl: starts, resumes, rollbacks, stops."""
        if not processes.is_first():
            return
        record = {"event": event, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **details}
        with (self.path / "events.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


def saved_config(path: str) -> Config:
    """The config that a run was made with, its directory as it is now; InputError for no run."""
    file = pathlib.Path(path) / "config.json"
    try:
        config = from_json(file)
    except InputError as error:
        raise InputError(f"{path} is no run directory: {error}") from error
    return dataclasses.replace(config, run=dataclasses.replace(config.run, dir=path))


def git_commit() -> str | None:
    """The commit of the source tree that depthjax runs from, '+changes' where it is not clean; in
    an image without git, what its launcher says in DEPTHJAX_COMMIT."""

    def git(*arguments: str) -> str:
        folder = os.path.dirname(os.path.abspath(__file__))
        command = ["git", "-C", folder, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + (
            "+changes" if git("status", "--porcelain", "-uno") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("DEPTHJAX_COMMIT")


def check_unchanged(saved: dict[str, Any], config: Config) -> list[str]:
    """The fields that differ from the saved config and may, as 'name: old -> new'.

    Raises InputError that lists those which may not: the checkpoint would not fit, or the data
    would come in another order.
    """
    old, new = flatten(saved), flatten(config)
    names = [n for n in sorted(old.keys() | new.keys()) if old.get(n) != new.get(n)]
    fixed = [n for n in names if n.startswith(_FIXED) and n not in _FREE]
    if fixed:
        changes = ", ".join(f"{n}: {old.get(n)!r} -> {new.get(n)!r}" for n in fixed)
        raise InputError(
            f"the checkpoint in run.dir was made with another config ({changes}): set these back, "
            "or give another run.dir"
        )
    return [f"{n}: {old.get(n)} -> {new.get(n)}" for n in names]
