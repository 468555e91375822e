"""Where cached files live, and files that appear complete or not at all."""

import os
import uuid
from pathlib import Path

PARTIAL = ".partial"


def cache_dir() -> Path:
    """Return the folder for what depthjax builds once and reuses (it need not exist yet).

    It is `$DEPTHJAX_CACHE`, else `$XDG_CACHE_HOME/depthjax`, else `~/.cache/depthjax`.
    """
    if own := os.environ.get("DEPTHJAX_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "depthjax"


def partial_path(path: Path) -> Path:
    """Return a hidden name beside `path`, unique to this call, to write to before renaming."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}{PARTIAL}")


def publish(partial: Path, path: Path) -> None:
    """Rename the finished file `partial` to `path`, surviving a power cut once this returns."""
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path`; a reader sees the old file or the whole new one."""
    partial = partial_path(path)
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    publish(partial, path)
