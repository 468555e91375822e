"""Where a report goes, and what it needs."""

import pathlib

from depthjax.errors import InputError


def output_folder(path: str, own: str) -> pathlib.Path:
    """The folder that `--out` names, which need not be there yet.

    Raises InputError where it is no folder, or holds things but not the file `own`, by which a
    report's folder is known; and where the library that draws is missing.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError('figures need matplotlib: pip install "depthjax[plots]"') from error
    folder = pathlib.Path(path)
    if not path or (folder.exists() and not folder.is_dir()):
        raise InputError(f"out is {path!r}, which is no folder: give one, which may be new")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / own).exists():
        raise InputError(f"out is {path!r}, which holds other things: give a folder of its own")
    return folder
