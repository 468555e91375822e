"""Checkpoints of others, in and out: DepthBench's, Llamas of the hub, Kimi K3's names; GGUF files,
in; and depthjax's own model folder."""

from depthjax.interop.change import largest_difference, with_residual
from depthjax.interop.depthbench import DEPTHBENCH, from_depthbench, to_depthbench
from depthjax.interop.files import (
    check_free,
    config_beside,
    is_file_name,
    read_json,
    read_tensors,
    write_checkpoint,
)
from depthjax.interop.folder import DEPTHJAX, is_model_folder, read_folder, with_vocab
from depthjax.interop.gguf import SUFFIX as GGUF_SUFFIX
from depthjax.interop.gguf import read_gguf
from depthjax.interop.llama import KIMI_K3, LLAMA
from depthjax.interop.tensors import Format, Values, export, fill, function_fields, load

FORMATS: dict[str, Format] = {f.name: f for f in (DEPTHJAX, DEPTHBENCH, KIMI_K3, LLAMA)}


def format_of(config: Values) -> Format | None:
    """The format that a config (a JSON object) is of; None where it does not tell."""
    return next((format for format in FORMATS.values() if format.mark in config), None)


__all__ = [
    "DEPTHBENCH",
    "DEPTHJAX",
    "FORMATS",
    "GGUF_SUFFIX",
    "KIMI_K3",
    "LLAMA",
    "Format",
    "check_free",
    "config_beside",
    "export",
    "fill",
    "format_of",
    "from_depthbench",
    "function_fields",
    "is_file_name",
    "is_model_folder",
    "largest_difference",
    "load",
    "read_folder",
    "read_gguf",
    "read_json",
    "read_tensors",
    "to_depthbench",
    "with_residual",
    "with_vocab",
    "write_checkpoint",
]
